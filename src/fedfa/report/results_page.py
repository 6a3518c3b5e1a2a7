"""A page of results, made from committed run folders alone."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.errors import RunError
from fedfa.paper.cells import key_of
from fedfa.paper.declare import readings, study
from fedfa.paper.figures import Shown
from fedfa.paper.found import Runs
from fedfa.paper.inside import inside_markdown
from fedfa.paper.tables import as_markdown, numbers_by_key, study_table
from fedfa.report.comparison_table import HEADER, comparison_rows
from fedfa.studies.folder import RunFolder
from fedfa.text_tables import markdown_table


@dataclass(frozen=True)
class Row:
    """One committed run."""

    folder: Path
    setting: str
    summary: dict[str, Any]

    @property
    def sort_key(self) -> tuple[str, int, str]:
        """Setting, long runs first, name."""
        return self.setting, -int(self.summary["rounds"]), self.folder.name


def read_results(results: Path) -> list[Row]:
    """Every finished run under ``results/SETTING/RUN/``."""
    folders = [path.parent for path in results.glob("*/*/summary.json")]
    found = [(folder, RunFolder(folder).summary()) for folder in folders]
    rows = [Row(folder, folder.parent.name, summary) for folder, summary in found if summary is not None]
    return sorted(rows, key=lambda row: row.sort_key)


def results_table(results: Path, without: Collection[str] = ()) -> str:
    """The committed runs, but those of some settings, as a Markdown table with the paper's numbers beside them."""
    paper = numbers_by_key()
    lines = [
        "| setting | run | method | variant | rounds | seed | final | mean of last ten | best | the paper | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in read_results(results):
        if row.setting in without:
            continue
        summary = row.summary
        rounds, number = paper.get(key_of(RunFolder(row.folder).settings()), (0, None))
        comparable = number if summary["rounds"] == rounds else None
        cells = [
            row.setting,
            row.folder.name,
            summary["algorithm"],
            summary["variant"] or "–",
            str(summary["rounds"]),
            str(summary["seeds"]["training"]),
            f"**{100 * summary['final_accuracy']:.2f}**",
            f"{100 * summary['last10_accuracy']:.2f}",
            f"{100 * summary['best_accuracy']:.2f}",
            str(comparable).replace("(", " (") if comparable else "–",
            (summary["commit"] or "–")[:7],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_COMPARISON = re.compile(r"(<!-- comparison (\S+): begin -->\n).*?(<!-- comparison \2: end -->)", re.DOTALL)
_INSIDE = re.compile(r"(<!-- inside (\S+): begin -->\n).*?(<!-- inside \2: end -->)", re.DOTALL)
_PAPER = re.compile(r"(<!-- paper (\S+)((?: last10)?): begin -->\n).*?(<!-- paper \2\3: end -->)", re.DOTALL)


def refresh_page(page: Path, results: Path) -> str:
    """The page's text with its tables made anew.

    Runs of a setting that has marks of its own (``<!-- comparison SETTING: begin -->`` … ``end``) stand side by side
    between them; all others are listed between the marks for results. Between ``<!-- paper NAME: begin -->`` … ``end``
    goes one of the paper's tables, ours beside the paper's; with ``NAME last10``, ours as the mean of the last ten
    evaluations. Between ``<!-- inside NAME: begin -->`` … ``end`` goes what the probes saw in a study's runs.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(
            f"{page} cannot be read ({error}); name a page that has the marks {BEGIN} and {END}, where the table goes"
        ) from None
    compared = {found.group(2) for found in _COMPARISON.finditer(text)}
    head, mark, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise RunError(f"{page} lacks the marks {BEGIN} and {END} between which the table goes")
    text = f"{head}{BEGIN}\n\n{results_table(results, without=compared)}\n\n{END}{tail}"

    def table(found: re.Match[str]) -> str:
        begin, setting, end = found.groups()
        return f"{begin}\n{comparison_table(results / setting)}\n\n{end}"

    def paper_table(found: re.Match[str]) -> str:
        begin, name, steadier, end = found.groups()
        made = study_table(study(name), Runs.below([results]), "last10" if steadier else "final")
        return f"{begin}\n{as_markdown(made)}\n\n{end}"

    def inside(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        seen = Shown.of(study(name), Runs.below([results]), next(iter(readings())))
        return f"{begin}\n{inside_markdown(seen)}\n\n{end}"

    return _INSIDE.sub(inside, _PAPER.sub(paper_table, _COMPARISON.sub(table, text)))


def comparison_table(setting: Path) -> str:
    """The runs of one setting side by side, best mean of the last ten first; below, the commits they were made at."""
    folders = [path.parent for path in setting.glob("*/summary.json")]
    if not folders:
        raise RunError(f"{setting} holds no finished run, but a page wants a table of it")
    rows = sorted(comparison_rows(folders), key=lambda row: (-float(row[HEADER.index("last 10 %")]), row))
    commits = sorted(
        {(row.summary["commit"] or "–")[:7] for row in read_results(setting.parent) if row.folder in folders}
    )
    return f"{markdown_table(HEADER, rows)}\n\nCommits: {', '.join(commits)}."
