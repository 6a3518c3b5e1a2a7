"""What the commands share: the two consoles, plain tables, and the options that several commands have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.cli.completion import complete_algorithm, complete_assignment, complete_preset
from fedfa.errors import ConfigError

console = Console()
errors = Console(stderr=True)

ConfigFile = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A config file (TOML).")]
Preset = Annotated[
    str | None, typer.Option(help="Name of a preset; `fedfa presets` lists them.", autocompletion=complete_preset)
]
AlgorithmExpression = Annotated[
    str | None,
    typer.Option(
        help="Algorithm expression: methods joined by '+', a .py file, a variant after '@'.",
        autocompletion=complete_algorithm,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a config value, e.g. local.lr=0.05; repeat it.",
        autocompletion=complete_assignment,
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory; default: $FEDFA_DATA, else ~/.cache/fedfa.")]
Seeds = Annotated[
    list[str] | None,
    typer.Option("--seed", metavar="1,2,3", help="Seed of the training; several: separate them by commas."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; left out, one per core.")]


def say(text: str) -> None:
    """Print a message that may hold markup; the terminal breaks long lines, so that they can be copied whole."""
    console.print(text, soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """Print a value as JSON, for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def parse_seeds(texts: Sequence[str] | None, option: str = "--seed") -> list[int]:
    """Seeds from the command line, each once.

    Example:
        >>> parse_seeds(["1,2", "3"]), parse_seeds(None)
        ([1, 2, 3], [])
    """
    pieces = [piece.strip() for text in texts or () for piece in text.split(",")]
    if wrong := next((piece for piece in pieces if not piece.isdecimal()), None):
        raise ConfigError(f"{option} {wrong!r}: write whole numbers from 0, separated by commas, e.g. 1,2,3")
    if "" in pieces:
        raise ConfigError(f"{option}: a number is missing; write e.g. 1,2,3")
    return list(dict.fromkeys(map(int, pieces)))


def plain_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1, title: str | None = None
) -> Table:
    """A table without rules, its cells as they are: the first ``texts`` columns to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, title=title and escape(title), title_justify="left")
    for number, name in enumerate(header):
        table.add_column(escape(name), justify="left" if number < texts else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def result_text(summary: Mapping[str, Any]) -> str:
    """The accuracies of a finished run as a sentence, with whose model they are of and on what."""
    whose, chosen = summary.get("evaluated", {}), summary.get("chosen")
    on = " on validation samples" if whose.get("on") == "validation" else ""
    tested = f" on the test set, of round {chosen['round']} ({escape(chosen['by'])})," if chosen else ""
    clients = "; means over the clients' own models" if whose.get("model") == "clients" else ""
    count = summary.get("last10_count", 10)
    return (
        f"accuracy [bold]{summary['final_accuracy']:.2%}[/]{tested} after {summary['rounds']} rounds (best "
        f"{summary['best_accuracy']:.2%}, mean of the last {count} {summary['last10_accuracy']:.2%}{on}{clients})"
    )
