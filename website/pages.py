"""Hooks of the documentation site: pages made from the code, and links that leave docs/."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fedfa
from fedfa.algorithms.method import Method
from fedfa.algorithms.registry import methods
from fedfa.cli.app import app
from fedfa.experiment.config_keys import config_keys, type_text
from website.docstrings import as_markdown, costs, inline_markdown

ROOT = Path(__file__).parents[1]

REFERENCE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "experiments": (
        "Experiments",
        ("Experiment", "compare", "load", "run", "RunResult", "RoundRecord", "Callback", "LocalTraining", "Config"),
    ),
    "algorithms": (
        "Writing algorithms",
        (
            "Component", "Traits", "ClientContext", "Batch", "ServerStep", "Task", "Role", "WeightedSum", "Aggregate",
            "Algorithm", "Method", "register", "stackable", "SplitModel",
        ),
    ),
}  # fmt: skip
"""Public names of ``fedfa`` by page; those that no page names are on the page "Further names"."""
PACKAGES = {"fedfa.algorithms": "The methods as objects", "fedfa.data": "Data", "fedfa.errors": "Errors"}
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files beside docs/ that are pages too."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


# -- hooks ------------------------------------------------------------------------------------------------------------
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: generated pages, and at the end of the guides whatever page docs/ has besides."""
    nav: list[dict[str, Any]] = config.nav or []
    sections = {title: entries for entry in nav for title, entries in entry.items()}
    sections["Methods"] += [f"methods/{name}.md" for name in methods()]
    sections["Reference"] += list(reference_pages())
    named = set(_pages_in(nav))
    sections["Guides"] += sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name not in named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {f"methods/{name}.md": method_page(method) for name, method in methods().items()}
    pages |= reference_pages()
    pages |= {page: (ROOT / name).read_text(encoding="utf-8") for name, page in FROM_ROOT.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links that name a file show the page's title; those to no page lead to the repository, or are text without it."""
    from_root = page.file.src_uri in FROM_ROOT.values()
    repository = (config.repo_url or "").rstrip("/")

    def lead(found: re.Match[str]) -> str:
        text, target = found.groups()
        text = _title(text) or text
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        relative = _in_repository(path, from_root)
        if relative is None:
            return f"[{text}]({target})"
        if relative in FROM_ROOT:
            return f"[{text}]({FROM_ROOT[relative]}{mark}{anchor})"
        if relative.startswith("docs/") and files.get_file_from_path(relative.removeprefix("docs/")):
            return f"[{text}]({relative.removeprefix('docs/')}{mark}{anchor})"
        return f"[{text}]({repository}/blob/main/{relative})" if repository else text

    markdown = _LINK.sub(lead, markdown)
    return markdown.replace("](docs/pictures/", "](pictures/") if from_root else markdown


def _title(name: str) -> str | None:
    """The title of the page that a text such as ``docs/data.md`` names; None for other texts."""
    file = ROOT / name if name in FROM_ROOT else ROOT / "docs" / Path(name).name
    if not re.fullmatch(r"(docs/)?\w+\.md", name) or not file.is_file():
        return None
    found = re.match(r"# ([^:\n]+)", file.read_text(encoding="utf-8"))
    return found and found[1]


def _in_repository(path: str, from_root: bool) -> str | None:
    """The path from the root of a link that leaves docs/; None for the others."""
    if from_root:
        return path
    return path.removeprefix("../") if path.startswith("../") and not path.startswith("../../") else None


def _pages_in(nav: Any) -> Iterable[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages_in(one)


# -- methods ----------------------------------------------------------------------------------------------------------
def method_page(method: Method) -> str:
    """The page of one method, from the docstring of its file and the fields of its components."""
    explanation, account = costs(method.explanation())
    title, _, body = explanation.partition("\n")
    module = sys.modules[method.components[0].__module__]
    blocks = [
        f"# {method.name}",
        f"**{inline_markdown(title)}**" if title.lower().startswith(method.name) else inline_markdown(method.summary),
        as_markdown(body if title.lower().startswith(method.name) else explanation),
        "## Costs, and what the server learns",
        "\n".join(f"- **{label}.** {inline_markdown(_capital(text))}" for label, text in account.items()),
        "## Use",
        f"```sh\nfedfa run --preset digits-c2 --algorithm {method.name}\n```",
        _in_python(method),
        "## Options",
        _options(method) or "None.",
    ]
    if method.variants:
        rows = [[f"`{name}`", _values(values)] for name, values in method.variants.items()]
        blocks += ["## Variants", table(["variant", "what it sets"], rows)]
        blocks.append(f"`--algorithm {method.name}@VARIANT` or `--set algorithm.variant=VARIANT` chooses one.")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    name = Path(str(module.__file__)).name
    blocks += ["## Source", f'??? note "src/fedfa/algorithms/{name}"\n\n' + _indented(f"```python\n{source}```")]
    return "\n\n".join(blocks) + "\n"


def _in_python(method: Method) -> str:
    import fedfa.algorithms as catalogue

    name = {"fedfa": "FedFA"}.get(method.name, method.components[0].__name__)
    assert hasattr(catalogue, name), name
    return f"```python\nfrom fedfa.algorithms import {name}\n\nfedfa.Experiment({name}(), data=data, model=model)\n```"


def _options(method: Method) -> str:
    rows = []
    for component in method.components:
        for name, field in component.model_fields.items():
            key = f"`algorithm.{component.name}.{field.alias or name}`"
            meaning = inline_markdown(" ".join((field.description or "").split()))
            rows.append([key, f"`{type_text(field)}`", f"`{field.default!r}`", meaning])
    return table(["option", "type", "default", "meaning"], rows) if rows else ""


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key} = {value!r}`" for key, value in values.items()) or "the defaults"


# -- reference --------------------------------------------------------------------------------------------------------
def reference_pages() -> dict[str, str]:
    """The pages of public names, of the configuration and of the command line."""
    pages = {}
    named = {name for _, names in REFERENCE.values() for name in names}
    further = [name for name in fedfa.__all__ if name not in {*named, "algorithms", "data", "errors", "__version__"}]
    further = [name for name in further if inspect.getmodule(getattr(fedfa, name)) is not None]
    groups = {**REFERENCE, "further": ("Further names", tuple(n for n in further if n != "FedfaError"))}
    for page, (title, names) in groups.items():
        if names:
            pages[f"reference/{page}.md"] = _names_page(title, "fedfa", names)
    for package, title in PACKAGES.items():
        pages[f"reference/{package.replace('.', '-')}.md"] = _names_page(title, package, _public(package))
    pages["reference/config.md"] = config_page()
    pages["reference/command-line.md"] = command_page()
    return pages


def _public(package: str) -> list[str]:
    module = import_module(package)
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == package
    ]
    return [name for name in names if inspect.isclass(value := getattr(module, name)) or inspect.isfunction(value)]


def _names_page(title: str, package: str, names: Iterable[str]) -> str:
    return f"# {title}\n\n" + "\n\n".join(f"::: {package}.{name}" for name in names) + "\n"


def config_page() -> str:
    """Every key of a configuration."""
    rows = [
        [f"`{key.name}`", f"`{key.kind}`", f"`{key.default}`", key.description.replace("<", "&lt;")]
        for key in config_keys()
    ]
    return (
        "# Configuration\n\nEvery key of a configuration file and of `--set KEY=VALUE`; in Python: "
        '`fedfa.Config.preset("digits-c2", {"local": {"lr": 0.05}})`. The options of a method are on its '
        "[page](../methods.md). `fedfa config --json` prints a JSON schema for editors.\n\n"
        + table(["key", "type", "default", "meaning"], rows)
    )


def command_page() -> str:
    """Every command with its options."""
    blocks = ["# Command line", "`fedfa --install-completion` teaches your shell presets, methods and config keys."]
    _describe_command(typer.main.get_command(app), "fedfa", blocks)
    return "\n\n".join(blocks) + "\n"


def _describe_command(command: Any, path: str, blocks: list[str]) -> None:
    inner = getattr(command, "commands", {})
    if not inner:
        blocks += [f"## {path}", _plain(command.help or "")]
        rows = []
        for one in command.params:
            names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
            if one.param_type_name == "argument":
                names = f"`{one.metavar or one.name.upper()}`"
            if "--help" not in one.opts:
                rows.append([names, _plain(getattr(one, "help", None) or "")])
        if rows:
            blocks.append(table(["option", "meaning"], rows))
    for name, child in inner.items():
        _describe_command(child, f"{path} {name}", blocks)


# -- Markdown ---------------------------------------------------------------------------------------------------------
def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table whose cells may hold ``|``."""
    head = list(header)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))  # in code, a backslash would be shown
    return "".join(piece if piece.startswith("`") else piece.replace("|", "\\|") for piece in pieces) or "–"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("[", "\\[")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
