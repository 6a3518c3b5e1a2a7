"""The documentation site: built strictly, every link leads somewhere, every method and public name has its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag
from xml.etree import ElementTree

import pytest

import fedfa
from fedfa.algorithms.registry import methods
from fedfa.experiment.config_keys import config_keys

pytest.importorskip("mkdocs")
equations = pytest.importorskip("website.equations")
docstrings = pytest.importorskip("website.docstrings")

ROOT = Path(__file__).parents[1]


BUILT = pytest.mark.slow
"""Building takes about 15 seconds; ``make test-docs`` runs these tests."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CI builds it: any warning is an error."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class _Page(HTMLParser):
    """Links, resources and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if name := given.get("id") or (given.get("name") if tag == "a" else None):
            self.anchors.add(name)
        if tag == "a" and (target := given.get("href")):
            self.links.append(target)
        elif target := given.get("src") or (given.get("href") if tag == "link" else None):
            self.resources.append(target)


@BUILT
def test_every_link_and_resource_of_the_site_exists(site: Path) -> None:
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html") if file.name != "404.html"}
    assert len(pages) > 40
    wrong = []
    for file, page in pages.items():
        wrong += [f"{file.name}: {one} is fetched" for one in page.resources if re.match(r"(https?:)?//", one)]
        for target in (*page.links, *page.resources):
            if re.match(r"(https?|mailto):", target):
                continue
            path, anchor = urldefrag(target)
            there = (file.parent / unquote(path)).resolve() if path else file
            if not there.is_file():
                wrong.append(f"{file.relative_to(site)}: {target}")
            elif anchor and there in pages and unquote(anchor) not in pages[there].anchors and anchor != "__skip":
                wrong.append(f"{file.relative_to(site)}: {target} has no such place")
    assert wrong == []


@BUILT
def test_links_between_pages_have_titles_not_file_names(site: Path) -> None:
    pages = [page for page in site.glob("*.html") if page.name not in ("changelog.html", "404.html")]
    named = {page.name: re.findall(r"<a [^>]*>(?:docs/)?\w+\.md</a>", page.read_text("utf-8")) for page in pages}
    assert {name: found for name, found in named.items() if found} == {}


@BUILT
def test_every_method_has_a_page_with_equations_costs_and_options(site: Path) -> None:
    for name, method in methods().items():
        text = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
        assert re.search(r"<strong>Sends (per client and round|once)", text), name
        assert "<strong>What the server learns" in text, name
        for component in method.components:
            for option, field in component.model_fields.items():
                assert f"algorithm.{component.name}.{field.alias or option}" in text
        prose = re.sub(r"<(pre|code).*?</\1>|<math.*?</math>", "", text, flags=re.DOTALL)
        assert not re.search(r"[_^]\{", prose), f"{name}: an equation is not rendered"
        assert "<p><math" not in text, f"{name}: an equation is a paragraph of its own"
    nova = (site / "methods" / "fednova.html").read_text(encoding="utf-8")
    assert "<msub><mi>τ</mi><mtext>eff</mtext></msub>" in nova


@BUILT
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = (page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    anchors = {anchor for text in pages for anchor in re.findall(r'id="([\w.]+)"', text)}
    public = [f"fedfa.{name}" for name in fedfa.__all__ if name not in ("algorithms", "data", "errors", "__version__")]
    public += [f"fedfa.algorithms.{name}" for name in fedfa.algorithms.__all__]
    renamed = {"fedfa.FedfaError": "fedfa.errors.FedfaError"}
    assert [name for name in public if renamed.get(name, name) not in anchors] == []


def test_every_config_key_has_a_type_and_a_meaning() -> None:
    assert [key.name for key in config_keys() if not (key.kind and key.description)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w_t", "<msub><mi>w</mi><mi>t</mi></msub>"),
        ("n_y^γ", "<msubsup><mi>n</mi><mi>y</mi><mi>γ</mi></msubsup>"),
        ("ρ^{τ−k}", '<msup><mi>ρ</mi><mrow><mi>τ</mi><mo stretchy="false">−</mo><mi>k</mi></mrow></msup>'),
        ("N_ck", "<msub><mi>N</mi><mrow><mi>c</mi><mi>k</mi></mrow></msub>"),
        ("μ_cᵀ", "<msubsup><mi>μ</mi><mi>c</mi><mi>T</mi></msubsup>"),
        ("z_glob", "<msub><mi>z</mi><mtext>glob</mtext></msub>"),
        ("√v", "<msqrt><mi>v</mi></msqrt>"),
        ("β₁", "<msub><mi>β</mi><mn>1</mn></msub>"),
        ("exp(z)", '<mi mathvariant="normal">exp</mi><mo stretchy="false">(</mo><mi>z</mi><mo stretchy="false">)</mo>'),
        ("a < 2.5", '<mi>a</mi><mo stretchy="false">&lt;</mo><mn>2.5</mn>'),
    ],
)
def test_equations_become_mathml(text: str, expected: str) -> None:
    assert equations.math_row(text) == expected


def test_all_equations_of_the_methods_are_well_formed() -> None:
    seen = 0
    for method in methods().values():
        text, _ = docstrings.costs(method.explanation())
        for found in re.findall(r"<math.*?</math>", docstrings.as_markdown(text), flags=re.DOTALL):
            ElementTree.fromstring(found)
            seen += 1
    assert seen > 60


def test_equations_are_not_parted_from_what_encloses_them() -> None:
    assert equations.inline("by ‖a_i‖ and").count("‖&#8288;<span>") == 1
    assert "</span>&#8288;‖ and" in equations.inline("by ‖a_i‖ and")


def test_code_in_docstrings_is_no_equation() -> None:
    assert docstrings.inline_markdown("``drop_last`` and w_t") == (
        "``drop_last`` and <span><math><msub><mi>w</mi><mi>t</mi></msub></math></span>"
    )
