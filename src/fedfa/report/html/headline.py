"""What a chapter shows, in a sentence; its paired differences; all chapters in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fedfa.report.html.chart import Table
from fedfa.report.html.grouping import Chapter, MethodRuns
from fedfa.report.html.tables import plain
from fedfa.report.paired_differences import (
    MEASURES,
    PAIRS_HEADER,
    PAIRS_LEGEND,
    PairedDifference,
    Scores,
    paired_differences,
)


def scores_of_chapter(chapter: Chapter) -> dict[str, Scores]:
    """Accuracies in percent of the finished runs, by method and seed; FedAvg, the baseline, first."""
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    for method in sorted(chapter.methods, key=lambda method: not _is_baseline(method)):
        for run in method.runs:
            if run.finished and all(isinstance(run.results.get(measure), int | float) for measure in MEASURES):
                values = {measure: 100 * float(run.results[measure]) for measure in MEASURES}
                found.setdefault(method.name, {})[run.seed] = values
    return dict(found)


def headline(chapter: Chapter) -> str:
    """The best method, how far it is ahead, and whether that exceeds the noise between seeds.

    The measure is the mean of the last ten evaluations, or of all where there are fewer, which a single lucky round
    cannot decide.
    """
    ranked = _ranked(chapter)
    if not ranked:
        return ""
    best, mean = ranked[0]
    finished = [method for method in chapter.methods if method.finished]
    running = " so far" if len(finished) < len(chapter.methods) else ""
    measured = _measured([method for method, _ in ranked])
    if len(ranked) == 1:
        return f"{best.name} reaches {mean:.2f} %{running} ({measured})."
    second, other = ranked[1]
    ahead = mean - other
    if ahead < 0.005:
        return f"{best.name} and {second.name} both reach {mean:.2f} %{running} ({measured})."
    sentence = (
        f"{best.name} is best{running} with {mean:.2f} % ({measured}), {ahead:.2f} points ahead of "
        f"{second.name}{_certainty(chapter, best.name, second.name)}"
    )
    first = next(((method, value) for method, value in ranked[2:] if _is_baseline(method)), None)
    return f"{sentence}; {first[0].name} reaches {first[1]:.2f} %." if first else f"{sentence}."


def _measured(methods: Sequence[MethodRuns]) -> str:
    """What the numbers are means of; with fewer than ten evaluations, the first rounds count too."""
    counts = {len(run.evaluated) for method in methods for run in method.runs if run.evaluated}
    if min(counts, default=10) >= 10:
        return "mean of the last ten evaluations"
    if len(counts) > 1:
        return "mean of all evaluations, ten at most"
    (count,) = counts
    return f"mean of all {count} evaluations" if count > 1 else "a single evaluation"


def _is_baseline(method: MethodRuns) -> bool:
    return method.name.partition("@")[0] == "fedavg"


def _ranked(chapter: Chapter) -> list[tuple[MethodRuns, float]]:
    found = [(method, method.over_seeds("last10_accuracy", 100)) for method in chapter.methods]
    return sorted(((method, one.mean) for method, one in found if one), key=lambda pair: -pair[1])


def _certainty(chapter: Chapter, best: str, second: str) -> str:
    """Whether the lead exceeds the noise, from the two methods' own seeds."""
    scores = scores_of_chapter(chapter)
    if not {best, second} <= set(scores):
        return ""
    pairs = paired_differences({second: scores[second], best: scores[best]})
    if not pairs:
        return " (no seed in common)"
    verdict = pairs[0].verdict.rpartition("last 10: ")[2] if "last 10: " in pairs[0].verdict else pairs[0].verdict
    if verdict == "yes":
        return ", more than the noise between seeds"
    if verdict == "no":
        return ", which seed noise could explain"
    return " (too few seeds to say whether that is noise)" if "seed" in verdict else ""


def differences(chapter: Chapter) -> str:
    """The table of paired differences that ``fedfa compare`` prints; empty where no two methods share a seed."""
    pairs: Sequence[PairedDifference] = paired_differences(scores_of_chapter(chapter))
    if not pairs:
        return ""
    table = plain(Table(PAIRS_HEADER, [pair.row() for pair in pairs]), "Differences on equal seeds")
    return (
        f'<div class="box"><h4>Differences on equal seeds</h4>{table}'
        f'<p class="quiet small">{escape(PAIRS_LEGEND)}</p></div>'
    )


def overview(chapters: Sequence[Chapter]) -> str:
    """Methods × settings: the mean of the last ten evaluations; empty for a single chapter."""
    if len(chapters) < 2:
        return ""
    names = sorted({method.name for chapter in chapters for method in chapter.methods})
    values = {
        (chapter.title, method.name): found
        for chapter in chapters
        for method in chapter.methods
        if (found := method.over_seeds("last10_accuracy", 100)) is not None
    }
    if not values:
        return ""
    best = {c.title: max((v.mean for (title, _), v in values.items() if title == c.title), default=0) for c in chapters}
    rows = []
    for name in names:
        cells = []
        for chapter in chapters:
            found = values.get((chapter.title, name))
            text = "–" if found is None else str(found)
            mark = ' class="most"' if found is not None and found.mean == best[chapter.title] else ""
            cells.append(f"<td{mark}>{escape(text)}</td>")
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    heads = "".join(
        f'<th scope="col"><a href="#c{place}">{escape(chapter.title)}</a></th>'
        for place, chapter in enumerate(chapters)
    )
    return (
        '<section><h2 class="chapter" id="overview">Overview</h2><div class="box">'
        '<div class="scroll" tabindex="0" role="region" aria-label="Overview"><table class="settings"><thead><tr>'
        f'<th scope="col">method</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="quiet small">Mean of the last ten evaluations (of all where there are fewer) in percent, standard '
        "deviation over seeds, in brackets the number of seeds. Bold: the highest of its setting.</p></div></section>"
    )
