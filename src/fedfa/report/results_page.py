"""Tables of a results page, made from committed run directories alone."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from fedfa.algorithms.registry import expression_names
from fedfa.errors import RunError
from fedfa.experiment.recorded_runs import RecordedRun, find_runs
from fedfa.paper.cells import key_of
from fedfa.paper.declarations import main_reading, study
from fedfa.paper.diagnostics_tables import diagnostics_markdown
from fedfa.paper.figures import FigureRuns
from fedfa.paper.run_index import RunIndex
from fedfa.paper.tables import as_markdown, numbers_by_key, study_table
from fedfa.report.comparison_table import HEADER, comparison_row
from fedfa.text_tables import markdown_table


def read_results(results: Path) -> list[RecordedRun]:
    """Every finished run below ``results/SETTING/RUN/``: by setting, long runs first, then by name.

    Raises:
        RunError: A run cannot be read.
    """
    found = find_runs([results])
    errors = [f"{problem.path} {problem.message}" for problem in found.problems]
    errors += [error for run in found.runs if (error := run.config_error or run.summary_error)]
    if errors:
        raise RunError("; ".join(errors))
    runs = [run for run in found.runs if run.finished]
    return sorted(runs, key=lambda run: (run.path.parent.name, -run.rounds, run.path.name))


def results_table(results: Path, without: Collection[str] = ()) -> str:
    """The finished runs, except those of some settings, as a Markdown table with the paper's numbers."""
    paper = numbers_by_key()
    lines = [
        "| setting | run | method | variant | rounds | seed | final | mean of last ten | best | the paper | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in read_results(results):
        if (setting := run.path.parent.name) in without:
            continue
        assert run.summary is not None
        rounds, number = paper.get(key_of(run.config), (0, None))
        cells = [
            setting,
            run.path.name,
            "+".join(expression_names(run.summary["algorithm"])),
            run.summary["variant"] or "–",
            str(run.rounds),
            str(run.seed),
            f"**{run.accuracy():.2f}**",
            f"{run.accuracy('last10'):.2f}",
            f"{100 * run.summary['best_accuracy']:.2f}",
            str(number).replace("(", " (") if number and run.rounds == rounds else "–",
            _commit(run),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_TABLES = re.compile(
    r"(<!-- (comparison|paper|inside|diagnostics) (\S+)( last10)?: begin -->\n).*?(<!-- \2 \3\4?: end -->)", re.DOTALL
)


def refresh_page(page: Path, results: Path) -> str:
    """The text of a page with its tables made anew between their marks, ``<!-- KIND NAME: begin -->`` … ``end``.

    - ``results`` (without a name): the list of all runs except those of compared settings;
    - ``comparison SETTING``: the runs of one setting side by side;
    - ``paper STUDY``: our numbers beside the paper's; ``paper STUDY last10``: our mean of the last ten evaluations;
    - ``diagnostics STUDY`` (or ``inside STUDY``): the diagnostics of a study's runs.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{page} cannot be read ({error}); name a page with the marks {BEGIN} and {END}") from None
    compared = {found[3] for found in _TABLES.finditer(text) if found[2] == "comparison"}
    head, mark, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise RunError(f"{page} lacks the marks {BEGIN} and {END}; add them where the table goes")
    text = f"{head}{BEGIN}\n\n{results_table(results, without=compared)}\n\n{END}{tail}"
    runs = RunIndex.below([results])

    def table(found: re.Match[str]) -> str:
        begin, kind, name, last10, end = found.groups()
        if kind == "comparison":
            made = comparison_table(results / name)
        elif kind == "paper":
            made = as_markdown(study_table(study(name), runs, "last10" if last10 else "final"))
        else:
            made = diagnostics_markdown(FigureRuns.of(study(name), runs, main_reading()))
        return f"{begin}\n{made}\n\n{end}"

    return _TABLES.sub(table, text)


def comparison_table(setting: Path) -> str:
    """The runs of one setting side by side, best mean of the last ten first; below, their commits."""
    runs = read_results(setting)
    if not runs:
        raise RunError(f"{setting} holds no finished run, but the page has a mark for its table")
    rows = sorted(map(comparison_row, runs), key=lambda row: (-float(row[HEADER.index("last 10 %")]), row))
    commits = sorted({_commit(run) for run in runs})
    return f"{markdown_table(HEADER, rows)}\n\nCommits: {', '.join(commits)}."


def _commit(run: RecordedRun) -> str:
    return ((run.summary or {})["commit"] or "–")[:7]
