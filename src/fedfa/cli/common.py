"""What the commands share: the two consoles, plain tables, and the options that several commands have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()
errors = Console(stderr=True)

ConfigFile = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A config file (TOML).")]
Preset = Annotated[str | None, typer.Option(help="Name of a preset; `fedfa presets` lists them.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a config value, e.g. local.lr=0.05; repeat it."),
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
DataDir = Annotated[Path | None, typer.Option(help="Data directory; default: $FEDFA_DATA, else ~/.cache/fedfa.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; left out, one per core.")]


def say(text: str) -> None:
    """Print a message that may hold markup; the terminal breaks long lines, so that they can be copied whole."""
    console.print(text, soft_wrap=True, highlight=False)


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
    """The accuracies of a finished run in words, with whose model they are of and on what."""
    whose, chosen = summary.get("evaluated", {}), summary.get("chosen")
    on = " on validation samples" if whose.get("on") == "validation" else ""
    tested = f" on the test set, of round {chosen['round']} ({escape(chosen['by'])})," if chosen else ""
    clients = "; means over the clients' own models" if whose.get("model") == "clients" else ""
    count = summary.get("last10_count", 10)
    return (
        f"accuracy [bold]{summary['final_accuracy']:.2%}[/]{tested} after {summary['rounds']} rounds (best "
        f"{summary['best_accuracy']:.2%}, mean of the last {count} {summary['last10_accuracy']:.2%}{on}{clients})"
    )
