"""The code in the README and in the guides runs as it stands, and their commands exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedfa.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE_NAMES = ("README.md", "docs/experiments.md", "docs/evaluation.md", "docs/tuning.md", "docs/start.md")
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGE_NAMES}


def blocks(kind: str, text: str = README) -> list[tuple[str, str]]:
    """Code blocks marked with ``<!-- tested: kind argument -->``, as (argument, code)."""
    return re.findall(rf"<!-- tested: {kind} ?(.*?) ?-->\n```python\n(.*?)```", text, flags=re.DOTALL)


EXAMPLES = [  # those that start processes, as `compare` does, take their time
    pytest.param(code, id=f"{page}-{number}", marks=[pytest.mark.system] if "compare(" in code or "tun" in page else [])
    for page, text in PAGES.items()
    for number, (_, code) in enumerate(blocks("python", text))
]


def fedfa(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_pages_hold_the_expected_number_of_examples() -> None:
    assert {page: len(blocks("python", text)) for page, text in PAGES.items()} == {
        "README.md": 2,
        "docs/experiments.md": 5,
        "docs/evaluation.md": 1,
        "docs/tuning.md": 1,
        "docs/start.md": 2,
    }
    assert [name for name, _ in blocks("file")] == ["pull.py"]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("code", EXAMPLES)
def test_python_examples_run(code: str) -> None:
    Path("script.py").write_text(code, encoding="utf-8")
    runpy.run_path("script.py", run_name="__main__")


def test_the_first_example_of_the_readme_has_at_most_twelve_lines() -> None:
    _, code = blocks("python")[0]
    assert len(code.splitlines()) <= 12


def test_own_algorithm_is_short_and_runs_alone_and_combined() -> None:
    ((name, code),) = blocks("file")
    Path(name).write_text(code, encoding="utf-8")
    assert len(code.splitlines()) <= 26
    for algorithm, out in ((name, "alone"), (f"fedfa+{name}", "combined")):
        command = ["run", "--preset", "digits-c2", "--algorithm", algorithm, "--rounds", "3", "--out", out]
        printed = fedfa(*command, "--set", "algorithm.pull.strength=0.1")
        assert "after 3 rounds" in printed


def test_the_pull_component_keeps_the_model_near_its_start() -> None:
    """With a strong pull one round changes the model less."""
    ((name, code),) = blocks("file")
    Path(name).write_text(code, encoding="utf-8")
    norms = {}
    for strength in ("0", "5"):
        command = ["run", "--preset", "digits-c2", "--algorithm", name, "--rounds", "1", "--out", strength]
        fedfa(*command, "--set", f"algorithm.pull.strength={strength}")
        state = load_file(Path(strength) / "server.safetensors")
        norms[strength] = sum(value.norm() for key, value in state.items() if key.startswith("pull/"))
    assert norms["5"] < 0.7 * norms["0"]


def test_the_method_of_the_guide_runs_and_with_alpha_one_is_fedavg() -> None:
    ((name, code),) = blocks("file", (ROOT / "docs/algorithms.md").read_text(encoding="utf-8"))
    Path(name).write_text(code, encoding="utf-8")
    models = {}
    for algorithm, alpha in (("fedavg", None), (name, "1"), (name, "0.5")):
        out = f"{algorithm}-{alpha}"
        command = ["run", "--preset", "digits-c2", "--algorithm", algorithm, "--rounds", "2", "--out", out]
        options = [] if alpha is None else ["--set", f"algorithm.fedcm.alpha={alpha}"]
        fedfa(*command, *options)
        models[alpha] = load_file(Path(out) / "model.safetensors")
    assert all(value.equal(models["1"][key]) for key, value in models[None].items())
    assert not all(value.allclose(models["0.5"][key], atol=1e-3) for key, value in models[None].items())


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^(?:make )(\w+)", README, flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_relative_links_lead_to_existing_files() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
