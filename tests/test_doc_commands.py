"""Every `fedfa` command in the README, the guides and the notebooks: it exists, with its options, presets and keys."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fedfa.algorithms.registry import methods
from fedfa.cli.app import app
from fedfa.experiment.config import Config, preset_layer
from fedfa.experiment.layers import assign, expression_and_variant

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def commands_of(page: Path) -> Iterator[str]:
    """Commands in blocks of shell code, and inline where nothing is left to be filled in."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        sources = ("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        for source in sources:
            yield from re.findall(r"(?m)^!\s*(fedfa .*)$", source)
        return
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for one in re.split(r"  +#|\s{4,}(?=fedfa )", line.removeprefix("$ ")):
                yield from re.findall(r"^(?:[A-Z_]+=\S+ )*(fedfa .*)$", one.strip())
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for inline in re.findall(r"`(fedfa [^`]*)`", prose):
        if not re.search(r"[A-Z]{3,}|…|\.\.\.|\[", inline):
            yield " ".join(inline.split())


COMMAND_LINE: Any = typer.main.get_command(app)
COMMANDS = sorted({(command, page.name) for page in (*PAGES, *NOTEBOOKS) for command in commands_of(page)})


def parsed(command: str) -> dict[str, Any]:
    """The values of its options as they stand; a name that does not exist is an error."""
    words = shlex.split(re.sub(r"\s+[|>&].*", "", command), comments=True)[1:]
    found, path = COMMAND_LINE, list[str]()
    while words and hasattr(found, "commands") and not words[0].startswith("-"):
        assert words[0] in found.commands, f"there is no command {' '.join([*path, words[0]])}"
        path.append(words.pop(0))
        found = found.commands[path[-1]]
    context = click.Context(found, info_name=path[-1] if path else "fedfa", **found.context_settings)
    values: dict[str, Any]
    values, rest, _ = found.make_parser(context).parse_args(list(words))
    assert not rest or not path or not hasattr(found, "commands"), f"{rest} is left over"
    return values


def test_there_are_many() -> None:
    assert len(COMMANDS) > 80


@pytest.mark.parametrize(("command", "page"), COMMANDS, ids=[f"{page}: {command}" for command, page in COMMANDS])
def test_command_of_the_docs_exists(command: str, page: str) -> None:
    values = parsed(command)
    known = {*methods(), "all"}
    for expression in _list(values.get("algorithm")) + _list(values.get("algorithms")):
        for component in expression_and_variant(expression)["name"].split("+"):
            assert component in known or component.endswith(".py"), component
    presets = _list(values.get("preset")) + _list(values.get("presets"))
    keys = [text for text in _list(values.get("assignments")) if not re.match(r"algorithm\.|.*\.py:", text)]
    if command.startswith("fedfa fleet"):
        keys.append("fleet.devices=phones")
    for preset in presets or ["digits-c2"]:
        Config.resolve(assign(preset_layer(preset), keys))


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(one) for one in value or ()]
