"""`fedfa compare`: methods side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.cli.progress import RoundsProgress
from fedfa.errors import FedfaError, RecipeError


def run_compare(
    console: Console,
    methods: Sequence[str],
    seeds: Sequence[int],
    layers: Sequence[dict[str, Any]],
    out: Path,
    jobs: int | None,
) -> None:
    """Run what is missing, print the table, write it to ``table.md``; fail at the end if a run failed."""
    from fedfa.algorithms.registry import methods as known
    from fedfa.engines.cores import available_cores
    from fedfa.report.comparison_table import HEADER, comparison_rows
    from fedfa.report.paired_differences import PAIRS_HEADER, PAIRS_LEGEND, paired_rows, scores_of
    from fedfa.studies.compare import Cell, Comparison, plan_cells
    from fedfa.studies.files import write_atomically
    from fedfa.studies.settings import Settings
    from fedfa.studies.setup import load_dataset
    from fedfa.text_tables import markdown_table

    common = Settings.resolve(*layers)
    with console.status(f"getting {escape(common.data.name)}"):
        load_dataset(common)  # once, before several processes ask for it
    wanted: list[str] = []
    for method in methods:
        wanted += _those_that_fit(console, list(known()), layers) if method == "all" else [method]
    cells = plan_cells(list(dict.fromkeys(wanted)), seeds or [common.seed], layers, out)
    out.mkdir(parents=True, exist_ok=True)
    with RoundsProgress(console) as progress:
        watchers: dict[str, Any] = {}

        def watch(cell: Cell, record: dict[str, Any]) -> None:
            name = cell.folder.name
            if name not in watchers:
                watchers[name] = progress.add(name, cell.settings.rounds)
            watchers[name](record)

        work = Comparison(cells, jobs or available_cores(), watch)
        progress.during(work.run)
    for busy in work.busy:
        console.print(f"left alone: {escape(busy)}, another process is working on it", soft_wrap=True)
    good = [cell for cell in cells if cell.name not in work.failed]
    rows = comparison_rows([cell.folder for cell in good])
    _print_table(console, HEADER, rows)
    text = markdown_table(HEADER, rows) + "\n"
    by_method: dict[str, list[Path]] = {}
    for cell in good:
        by_method.setdefault(cell.title, []).append(cell.folder)
    if differences := paired_rows(scores_of(by_method)):
        console.print()
        _print_table(console, PAIRS_HEADER, differences)
        console.print(PAIRS_LEGEND, style="dim", highlight=False)
        text += f"\n{markdown_table(PAIRS_HEADER, differences)}\n\n{PAIRS_LEGEND}\n"
    write_atomically(out / "table.md", text)
    console.print(f"Also in {escape(str(out / 'table.md'))}; the runs' records are beside it.", soft_wrap=True)
    if work.failed:
        raise FedfaError("\n".join(f"{name}: {reason}" for name, reason in work.failed.items()))


def _print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for number, title in enumerate(header):
        table.add_column(title, no_wrap=True, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _those_that_fit(console: Console, names: list[str], layers: Sequence[dict[str, Any]]) -> list[str]:
    """The methods that can work with this network and these settings; says which cannot, and why."""
    from fedfa.studies.settings import Settings
    from fedfa.studies.setup import prepare

    fitting = []
    for name in names:
        try:
            prepare(Settings.resolve(*layers, {"algorithm": {"recipe": name}}))
            fitting.append(name)
        except RecipeError as error:
            console.print(f"left out: {name} ({escape(str(error))})", soft_wrap=True)
    return fitting
