"""`fedfa compare`: algorithms compared in one setting or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from fedfa.cli.common import plain_table, print_json
from fedfa.cli.progress import RoundsProgress
from fedfa.errors import AlgorithmError, ConfigError, FedfaError

if TYPE_CHECKING:
    from fedfa.experiment.run_processes import RunProcesses
    from fedfa.experiment.sweep import Cell
    from fedfa.experiment.variations import Setting
    from fedfa.report.comparison_summary import SettingResults


def run_compare(
    console: Console,
    methods: Sequence[str],
    seeds: Sequence[int],
    config: Sequence[Setting],
    out: Path,
    jobs: int | None,
    processes: RunProcesses,
    *,
    as_json: bool = False,
) -> None:
    """Run what is missing, print the tables, write them to ``table.*``; fail at the end if a run is missing.

    With ``as_json``, standard output holds only the JSON; the console is another one.
    """
    from fedfa.experiment.sweep import Comparison
    from fedfa.report.comparison_summary import SettingResults, as_values, why_missing

    planned = [_cells_of(console, setting, methods, seeds) for setting in config]
    wanted = [cell for cells, _ in planned for cell in cells]
    _get_data(console, wanted)
    out.mkdir(parents=True, exist_ok=True)
    with RoundsProgress(console) as progress:
        work = Comparison(wanted, jobs, progress.watch, count=progress.count, processes=processes)
        progress.during(work.run)
    results = []
    for setting, (cells, left_out) in zip(config, planned, strict=True):
        reasons = {cell.name: reason for cell in cells if (reason := why_missing(work, cell)) is not None}
        results.append(SettingResults(setting.labels, cells, reasons, left_out))
    missing = {name: reason for one in results for name, reason in one.missing.items()}
    for name in work.busy:
        if name in missing:
            console.print(f"skipped: {escape(name)}, another process is working on it", soft_wrap=True)
    if any(one.finished for one in results):
        _write_results(results, out)  # first: printing may fail, as when the output is piped to `head`
        if as_json:
            print_json(as_values(results))
        else:
            _print_results(console, results)
        written = f"{escape(str(out / 'table.md'))}, table.tex and table.csv"
        console.print(f"Also in {written}; the runs' records are beside them.", soft_wrap=True)
    else:
        text = f"No run is complete, so no table is made; tables in {escape(str(out))} are left as they were."
        console.print(text, soft_wrap=True)
    if failed := [f"{name}: {reason}" for name, reason in missing.items() if name not in work.busy]:
        raise FedfaError("\n".join(failed))


def _get_data(console: Console, cells: Sequence[Cell]) -> None:
    """Load every data set once, before several processes need it."""
    from fedfa.experiment.build import load_dataset

    for config in {(cell.config.data.name, cell.config.data.dir): cell.config for cell in cells}.values():
        with console.status(f"loading {escape(config.data.name)}"):
            load_dataset(config)


def _cells_of(
    console: Console, setting: Setting, methods: Sequence[str], seeds: Sequence[int]
) -> tuple[list[Cell], dict[str, str]]:
    """The runs of one setting; and what ``all`` does not mean here, with the reason."""
    from fedfa.experiment.sweep import plan_cells

    wanted: list[str] = []
    left_out: dict[str, str] = {}
    try:
        for method in methods:
            if method == "all":
                with console.status("checking which methods fit"):
                    fitting, left_out = _those_that_fit(setting)
                wanted += fitting
            else:
                wanted.append(method)
        wanted = list(dict.fromkeys(wanted))
        cells = plan_cells(wanted, seeds, setting.layers, setting.directory, setting.name, setting.elsewhere)
    except ConfigError as error:
        raise ConfigError(f"{setting.title}: {error}" if setting.name else str(error)) from None
    for name, reason in left_out.items():
        where = f"{setting.title}: " if setting.name else ""
        console.print(escape(f"{where}left out: {name} ({reason})"), soft_wrap=True)
    return cells, left_out


def _those_that_fit(setting: Setting) -> tuple[list[str], dict[str, str]]:
    """The methods that fit this network and config; and why the others do not."""
    from fedfa.algorithms.registry import methods
    from fedfa.experiment.config import Config
    from fedfa.experiment.experiment import Experiment

    fitting, others = [], {}
    for name in methods():
        try:
            Experiment.from_config(Config.resolve(*setting.layers, {"algorithm": {"name": name}})).training.init()
            fitting.append(name)
        except AlgorithmError as error:
            others[name] = str(error)
    return fitting, others


def _print_results(console: Console, results: Sequence[SettingResults]) -> None:
    from fedfa.report.comparison_summary import legend, method_rows, notes
    from fedfa.report.comparison_table import HEADER
    from fedfa.report.metric_table import NOTE
    from fedfa.report.paired_differences import PAIRS_HEADER, PAIRS_LEGEND

    header = ["method", *("\n".join(one.labels) for one in results)]
    for titles, *rows in _as_wide_as_fits([header, *method_rows(results)], console.width):
        _print_table(console, titles, rows)
        console.print()
    for line in notes(results):
        console.print(escape(line), style="yellow", highlight=False, soft_wrap=True)
    console.print(legend(results), style="dim", highlight=False)
    for one in results:
        console.print()
        if len(results) > 1:
            console.print(escape(one.title), style="bold", highlight=False)
        if runs := one.run_rows():
            _print_table(console, HEADER, runs)
        if (measured := one.metric_table()) is not None:
            console.print()
            for titles, *lines in _as_wide_as_fits([measured[0], *measured[1]], console.width):
                _print_table(console, titles, lines)
            console.print(NOTE, style="dim", highlight=False)
        if pairs := one.pair_rows():
            console.print()
            _print_table(console, PAIRS_HEADER, pairs)
    if any(one.pair_rows() for one in results):
        console.print(PAIRS_LEGEND, style="dim", highlight=False)


def _as_wide_as_fits(lines: Sequence[Sequence[str]], width: int) -> list[list[list[str]]]:
    """A table split to fit a width, each piece with the first column: a terminal would cut numbers off."""
    first, *columns = zip(*lines, strict=True)
    components: list[list[tuple[str, ...]]] = []
    for column in columns:
        if not components or sum(map(_width, [first, *components[-1], column])) > width:
            components.append([])
        components[-1].append(column)
    return [[list(line) for line in zip(first, *component, strict=True)] for component in components]


def _width(column: Sequence[str]) -> int:
    return 1 + max(len(piece) for cell in column for piece in cell.split("\n"))


def _print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = plain_table(header, rows)
    table.padding = (0, 1, 0, 0)
    for number, column in enumerate(table.columns):
        column.min_width = max(len(row[number]) for row in rows)  # where room lacks, titles are folded, not numbers
    console.print(table)


def _write_results(results: Sequence[SettingResults], out: Path) -> None:
    from fedfa.experiment.files import write_atomically
    from fedfa.report.comparison_summary import as_csv, as_latex, as_markdown

    for ending, text in ((".md", as_markdown(results)), (".tex", as_latex(results)), (".csv", as_csv(results))):
        write_atomically(out / f"table{ending}", f"{text}\n")
