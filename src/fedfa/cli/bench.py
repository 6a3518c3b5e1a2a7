"""`fedfa bench`: how fast fedfa is on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

if TYPE_CHECKING:
    from fedfa.bench.sections import Section
    from fedfa.bench.tables import Table

PICTURE = "bench.svg"


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds, once: shows that it works, not how fast it is.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="cnn, tuned, bfloat16, gains, mlp, methods, pair, turns, clients, cohort or step; repeat it. "
            "Left out: all.",
        ),
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Repetitions; left out 3, with --quick 1.")] = None,
    out: Annotated[Path, typer.Option(help="Where records (JSON) and picture go.")] = Path("runs/bench"),
    peers: Annotated[
        Path | None, typer.Option(help="A file that names other simulators to run beside; see benchmarks/peers.toml.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write the tables into this page, between its marks.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the picture goes instead.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing: show what is in --out.")] = False,
) -> None:
    """Measure speed: contenders in turns, medians with spread. It takes a while; leave the machine alone meanwhile."""
    from fedfa.bench.page import machine, refresh_page
    from fedfa.bench.picture import check_drawing, draw
    from fedfa.bench.record import read_records
    from fedfa.bench.sections import choose, sections
    from fedfa.bench.tables import tables
    from fedfa.studies.files import write_atomically

    console = Console()
    known = sections(quick, peers)
    wanted = choose(known, only or [])
    check_drawing()
    if page is not None:
        refresh_page(page, {})  # a page without marks is refused now, not after an hour of measuring
    if not show:
        _measure(console, wanted, repeat or (1 if quick else 3), out)
    found = read_records(out)
    records = {section.name: found[section.name] for section in known if section.name in found}
    for section in wanted:
        for table in tables(records[section.name]) if section.name in records else ():
            console.print(_grid(table))
            console.print()
    console.print(escape(machine(records)), soft_wrap=True, highlight=False)
    drawn = draw(records, picture or out / PICTURE)
    console.print(f"Records are in {escape(str(out))}, the picture is {escape(str(drawn))}.", soft_wrap=True)
    if page is not None:
        write_atomically(page, refresh_page(page, records))


def _measure(console: Console, wanted: Sequence[Section], repeat: int, out: Path) -> None:
    from fedfa.bench.plain import TASKS
    from fedfa.bench.record import measure_section, write_record
    from fedfa.bench.tasks import write_arrays

    with tempfile.TemporaryDirectory() as arrays, console.status("getting the data") as status:

        def tell(news: str) -> None:
            status.update(escape(news))
            if not console.is_terminal:
                console.print(escape(news), soft_wrap=True, highlight=False)

        for task in TASKS.values():
            write_arrays(task, Path(arrays))
        for section in wanted:
            record = measure_section(section, repeat, Path(arrays), tell)
            write_record(out, record)
            for contender in record["contenders"]:
                _complain(console, contender)


def _complain(console: Console, contender: dict[str, Any]) -> None:
    for words in dict.fromkeys(one["failed"] for one in contender["measurements"] if "failed" in one):
        console.print(f"[red]failed:[/] {escape(contender['title'])}: {escape(words)}", soft_wrap=True)


def _grid(table: Table) -> Grid:
    grid = Grid(title=escape(table.title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for number, title in enumerate(table.header):
        grid.add_column(escape(title), justify="right" if number else "left")
    for row in table.rows:
        grid.add_row(*(escape(cell.replace("*", "")) for cell in row))
    return grid
