"""Command line of the benchmark: ``python -m benchmarks.bench`` in the repository."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from benchmarks.bench.contender_api import TASKS
from benchmarks.bench.fedfa_tasks import write_arrays
from benchmarks.bench.performance_page import machine, refresh_page
from benchmarks.bench.performance_plot import check_matplotlib, draw
from benchmarks.bench.records import measure_section, read_records, write_record
from benchmarks.bench.sections import Section, choose, sections
from benchmarks.bench.tables import tables
from fedfa.errors import FedfaError

console = Console()
NAMES = ", ".join(section.name for section in sections())


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few rounds, one repetition: shows that it works, not how fast it is.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"A section: {NAMES}; repeatable. Default: all.")
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Repetitions. Default: 3, with --quick 1.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the records (JSON) and the figure.")] = Path("runs/bench"),
    peers: Annotated[Path | None, typer.Option(help="File that lists other simulators: benchmarks/peers.toml.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the tables into this page, between its marks.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File of the figure. Default: bench.svg in --out.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing; show the records in --out.")] = False,
) -> None:
    """Measure speed: contenders interleaved, medians with spread. Leave the machine idle meanwhile."""
    known = sections(quick, peers)
    chosen = choose(known, only or [])
    # Fail now, not after an hour of measuring.
    check_matplotlib()
    if page is not None:
        refresh_page(page, {})
    if not show:
        _measure(chosen, repeat or (1 if quick else 3), out)
    found = read_records(out)
    records = {section.name: found[section.name] for section in known if section.name in found}
    for section in chosen:
        for table in tables(records[section.name]) if section.name in records else ():
            console.print(Markdown(f"**{table.title}**\n\n{table.markdown()}"))
    console.print(escape(machine(records)), soft_wrap=True, highlight=False)
    picture = picture or out / "bench.svg"
    draw(records, picture)
    console.print(f"Records: {escape(str(out))}. Figure: {escape(str(picture))}.", soft_wrap=True)
    if page is not None:
        page.write_text(refresh_page(page, records), encoding="utf-8")


def _measure(chosen: Sequence[Section], repetitions: int, out: Path) -> None:
    with tempfile.TemporaryDirectory() as arrays, console.status("loading the data") as status:

        def notify(news: str) -> None:
            status.update(escape(news))
            if not console.is_terminal:
                console.print(escape(news), soft_wrap=True, highlight=False)

        for task in TASKS.values():
            write_arrays(task, Path(arrays))
        for section in chosen:
            record = measure_section(section, repetitions, Path(arrays), notify)
            write_record(out, record)
            for contender in record["contenders"]:
                for reason in dict.fromkeys(one["failed"] for one in contender["measurements"] if "failed" in one):
                    console.print(f"[red]failed:[/] {escape(contender['title'])}: {escape(reason)}", soft_wrap=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that started programs are killed
    try:
        typer.run(bench)
    except FedfaError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
