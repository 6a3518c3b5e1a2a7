"""Which figures a chapter has: accuracy, costs, split, classes, domains. Numbers come from the records alone."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fedfa.report.html.chapters import Chapter, CurvePoint, Method
from fedfa.report.html.chart import HALF, NARROW, WIDE, Figure, Table, number, ticks
from fedfa.report.html.heat_maps import Heat, heat_map, heat_maps
from fedfa.report.html.lines import Axis, Panel, Series, hover_lines, line_chart, multiples
from fedfa.report.html.palette import Style
from fedfa.report.html.reading import Run
from fedfa.report.html.split import Split

Looks = Mapping[str, Style]
Pick = Callable[[Mapping[str, Any]], Sequence[float | None] | None]
"""Takes a list of values out of a round's record."""
_MOST_LINES = 5
"""More methods than this are shown once more in a chart of their own each."""
_MOST_ROWS = 60
"""Rows of a data table; longer curves are thinned out evenly."""


def slug(text: str) -> str:
    """A name for a file.

    Example:
        >>> slug("Fashion-MNIST, 100 clients")
        'fashion-mnist-100-clients'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "figure"


def band_words(methods: Sequence[Method]) -> str:
    """What the bands are, if there are any."""
    if all(len(method.runs) == 1 for method in methods):
        return "One seed each: lines differ by chance too."
    return "Lines are means over seeds, bands reach from the lowest seed to the highest."


def line_figure(
    name: str,
    title: str,
    caption: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    unit: str = "",
    half: bool = False,
    height: float = 400,
) -> Figure:
    """A figure of lines, for wide and narrow pages, with its table."""
    ends = [f"{one.name} ends at {number((one.after or one.points[-1])[1])}{unit}" for one in series if one.points]
    return Figure(
        name, title, caption,
        f"Lines over {x.label}: {y.label}. {'; '.join(ends)}.",
        line_chart(series, x, y, HALF if half else WIDE, 300 if half else height, names=not half or len(series) <= 6),
        line_chart(series, x, y, NARROW, 270, names=False),
        hover=[hover_lines(series, x.label, unit)],
        table=series_table(series, x.label),
        half=half,
    )  # fmt: skip


def series_table(series: Sequence[Series], x: str) -> Table:
    """The values of lines, a row for each place on the axis."""
    places = sorted({point[0] for one in series for point in one.points})
    note = ""
    if len(places) > _MOST_ROWS:
        every = math.ceil(len(places) / _MOST_ROWS)
        note = f"Every {every}th of {len(places)} rows."
        places = places[::-1][::every][::-1]
    columns = []
    for one in series:
        cells = {}
        for place, point in enumerate(one.points):
            text = number(point[1])
            if one.band and one.band[place][0] < one.band[place][1]:
                text += f" ({number(one.band[place][0])} to {number(one.band[place][1])})"
            cells[point[0]] = text
        columns.append(cells)
    digits = 0 if all(place == int(place) for place in places) else None
    rows = [[number(place, digits), *(cells.get(place, "") for cells in columns)] for place in places]
    after = [one.after for one in series]
    if any(after):
        rows.append(["after the last round", *(number(one[1]) if one else "" for one in after)])
    return Table([x, *(one.name for one in series)], rows, note)


def as_series(name: str, look: Style, curve: Sequence[CurvePoint], factor: float = 1.0) -> Series:
    """A curve over seeds as a line with its band."""
    points = [(point.x, factor * point.mean) for point in curve]
    band = [(factor * point.low, factor * point.high) for point in curve]
    return Series(name, look, points, band if any(low < high for low, high in band) else None)


# -- accuracy ---------------------------------------------------------------------------------------------------------
def accuracy_series(chapter: Chapter, looks: Looks) -> list[Series]:
    """Accuracy by round, in percent; methods without an evaluation are left out."""
    lines = []
    for method in chapter.methods:
        line = as_series(method.name, looks[method.name], method.curve(lambda r: r["accuracy"]), 100)
        after = method.after_survey()
        if line.points:
            lines.append(
                Series(line.name, line.style, line.points, line.band, (after[0], 100 * after[1]) if after else None)
            )
    return lines


def accuracy_figures(chapter: Chapter, looks: Looks) -> list[Figure]:
    """Accuracy by round: all lines together and, where they are many, each in front of the others."""
    series = accuracy_series(chapter, looks)
    if not series:
        return []
    x, y = Axis("round", low=0, whole=True), Axis("test accuracy, %", low=0, high=_ceiling(series))
    same = _same_lines(series)
    survey = (
        " A diamond is the accuracy after a step that follows the last round." if any(s.after for s in series) else ""
    )
    figures = [
        line_figure(
            "accuracy",
            "Accuracy by round",
            f"{band_words(chapter.methods)}{survey}{same}",
            series,
            x,
            y,
            unit=" %",
            height=420,
        )
    ]
    if len(series) > _MOST_LINES:
        panels = [Panel(one.name, [one], [other for other in series if other is not one]) for one in series]
        figures.append(
            Figure(
                "accuracy-each",
                "Each method in front of the others",
                "The same curves; grey ones are the other methods.",
                "The curves of the chart above in small charts, one for each method.",
                multiples(panels, x, y, WIDE),
                multiples(panels, x, y, NARROW, panel_width=172),
                hover=[hover_lines([one], x.label, " %") for one in series],
            )
        )
    return figures


def _same_lines(series: Sequence[Series]) -> str:
    """Names lines that lie on top of each other."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for one in series:
        groups.setdefault(tuple(one.points), []).append(one.name)
    words = [f"{', '.join(names[:-1])} and {names[-1]}" for names in groups.values() if len(names) > 1]
    return f" Equal in every round, so that one line covers the others: {'; '.join(words)}." if words else ""


def _ceiling(series: Sequence[Series]) -> float:
    """A round percentage above every line."""
    top = max(max(y for _, y in one.points) for one in series)
    top = max(
        [top, *(edge[1] for one in series for edge in one.band or ()), *(one.after[1] for one in series if one.after)]
    )
    return min(100.0, 10 * math.ceil(top / 10 + 1e-9))


# -- costs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Progress:
    """A run's evaluations with what had been spent by then."""

    round: int
    best: float
    seconds: float
    megabytes: float


def progress(run: Run) -> list[Progress]:
    """Best accuracy so far against costs so far, an entry for each evaluation."""
    rounds = [record for record in run.metrics if "survey" not in record]
    seconds = list(accumulate(float(record.get("train_seconds", 0)) for record in rounds))
    megabytes = list(accumulate((record.get("bytes_up", 0) + record.get("bytes_down", 0)) / 1e6 for record in rounds))
    best, entries = 0.0, []
    for place, record in enumerate(rounds):
        if record.get("accuracy") is not None:
            best = max(best, record["accuracy"])
            entries.append(Progress(int(record["round"]), best, seconds[place], megabytes[place]))
    return entries


def cost_figures(chapter: Chapter, looks: Looks) -> list[Figure]:
    """Best accuracy so far against seconds and against megabytes."""
    figures = []
    kinds: list[tuple[str, str, Callable[[Progress], float]]] = [
        ("seconds of training", "time", lambda entry: entry.seconds),
        ("megabytes, both ways", "bytes", lambda entry: entry.megabytes),
    ]
    for words, name, cost in kinds:
        series = []
        for method in chapter.methods:
            each = [{entry.round: entry for entry in progress(run)} for run in method.runs]
            each = [one for one in each if one]
            common = sorted(set.intersection(*(set(one) for one in each))) if each else []
            points = [
                (statistics.fmean(cost(one[at]) for one in each), 100 * statistics.fmean(one[at].best for one in each))
                for at in common
            ]
            if points:
                series.append(Series(method.name, looks[method.name], points))
        if series:
            figures.append(
                line_figure(
                    f"accuracy-by-{name}",
                    f"Best accuracy so far by {words}",
                    "",
                    series,
                    Axis(words, low=0),
                    Axis("best test accuracy so far, %", low=0, high=_ceiling(series)),
                    unit=" %",
                    half=True,
                )
            )
    return figures


@dataclass(frozen=True)
class Reach:
    """What it took to reach an accuracy: means over the seeds that did."""

    rounds: float
    seconds: float
    megabytes: float
    seeds: int
    of: int


def reach(method: Method, target: float) -> Reach | None:
    """When an evaluation first gave at least the target (a share, not percent); None if it never did."""
    first = [next((entry for entry in progress(run) if entry.best >= target), None) for run in method.runs]
    there = [entry for entry in first if entry is not None]
    if not there:
        return None
    return Reach(
        statistics.fmean(entry.round for entry in there),
        statistics.fmean(entry.seconds for entry in there),
        statistics.fmean(entry.megabytes for entry in there),
        len(there),
        len(method.runs),
    )


def targets_of(chapter: Chapter, asked: Sequence[float]) -> list[float]:
    """Accuracies in percent worth asking for: the given ones, or up to four round ones that some method reaches."""
    if asked:
        return sorted(set(asked))
    best = max((100 * r["accuracy"] for run in chapter.runs for r in run.evaluated), default=0.0)
    first = min((100 * run.evaluated[0]["accuracy"] for run in chapter.runs if run.evaluated), default=0.0)
    for step in (10.0, 5.0, 2.0, 1.0):
        found = [mark for mark in ticks(0, 100, round(100 / step)) if first < mark <= best]
        if len(found) >= 3:
            return found[-4:]
    return found


# -- the split --------------------------------------------------------------------------------------------------------
def split_figure(split: Split) -> Figure:
    """Clients × classes."""
    numbers = split.numbers
    biggest = max((count for row in split.counts for count in row), default=1) or 1
    by_class = [
        [row[label] or None for row in split.counts] for label in range(len(split.classes))
    ]  # a class a client lacks stays empty
    heat = Heat(
        split.classes, [str(client) for client in split.shown], by_class, row_word="class", column_word="client",
        unit=" samples",
    )  # fmt: skip
    cell = 22.0 if len(split.classes) <= 20 else max(4.0, 400 / len(split.classes))

    def draw(width: float) -> Any:
        # The square root keeps small counts apart from none at all.
        return heat_map(
            heat,
            width,
            low=0,
            high=biggest,
            cell=cell,
            share=lambda v: math.sqrt(v / biggest),
            digits=None,
            key="samples",
        )

    thinned = "" if len(split.shown) == split.clients else f" {len(split.shown)} of them are shown, evenly spaced."
    caption = (
        f"{split.clients:,} clients hold {numbers.assigned:,} samples: {numbers.smallest:,} to {numbers.largest:,} "
        f"each (median {numbers.median:,.0f}), {numbers.classes_held:.1f} classes on average. "
        f"Label skew {numbers.label_skew:.2f} "
        f"(0: every client is like the whole, towards 1: nothing in common).{thinned}"
    )
    if split.held:
        first = {name: split.shown[split.held.index(name)] for name in dict.fromkeys(split.held) if name}
        caption += " Domains: " + ", ".join(f"{name} from client {at}" for name, at in first.items()) + "."
    rows = [
        [str(client), *(f"{count:,}" if count else "" for count in row), f"{sum(row):,}"]
        for client, row in zip(split.shown, split.counts, strict=True)
    ]
    table = Table(["client", *split.classes, "all"], rows) if len(rows) * len(split.classes) <= 3000 else None
    return Figure(
        "split", "The split: clients × classes", caption, f"A heat map of samples by client and class. {caption}",
        draw(WIDE), draw(NARROW), hover=[heat.hover()], table=table,
    )  # fmt: skip


# -- classes and domains ----------------------------------------------------------------------------------------------
def _last_values(method: Method, pick: Pick) -> list[float | None]:
    """The last evaluation's list of values (after a survey, if there is one), mean over seeds."""
    lists = []
    for run in method.runs:
        records = [record for record in run.metrics if record.get("accuracy") is not None and pick(record)]
        if records:
            lists.append(list(pick(records[-1]) or []))
    if not lists:
        return []
    width = min(len(values) for values in lists)
    means: list[float | None] = []
    for place in range(width):
        values = [v for one in lists if (v := one[place]) is not None]
        means.append(100 * statistics.fmean(values) if values else None)
    return means


def class_figures(chapter: Chapter, names: Sequence[str]) -> list[Figure]:
    """Accuracy by class: at the end for each method, and by round."""

    def pick(record: Mapping[str, Any]) -> Sequence[float | None] | None:
        return record.get("class_accuracy")

    count = max((len(pick(r) or []) for run in chapter.runs for r in run.evaluated), default=0)
    labels = list(names) if len(names) == count else [str(label) for label in range(count)]
    return _kinds_figures(chapter, pick, labels, "class")


def domain_figures(chapter: Chapter) -> list[Figure]:
    """Accuracy by domain, where there are several."""
    found = [r["domain_accuracy"] for run in chapter.runs for r in run.evaluated if r.get("domain_accuracy")]
    names = list(dict.fromkeys(name for one in found for name in one))
    if len(names) < 2:
        return []

    def pick(record: Mapping[str, Any]) -> Sequence[float | None] | None:
        by_domain = record.get("domain_accuracy")
        return [by_domain.get(name) for name in names] if by_domain else None

    return _kinds_figures(chapter, pick, names, "domain")


def _kinds_figures(chapter: Chapter, pick: Pick, labels: list[str], word: str) -> list[Figure]:
    values = {method.name: _last_values(method, pick) for method in chapter.methods}
    values = {name: row for name, row in values.items() if row}
    if not values or len(labels) < 2:
        return []
    heat = Heat(list(values), labels, list(values.values()), row_word="method", column_word=word, unit=" %")
    rows = [[name, *(number(v, 1) for v in row)] for name, row in values.items()]
    end = Figure(
        f"{word}-accuracy", f"Accuracy by {word} at the end",
        f"Percent of each {word}'s test samples, at the last evaluation; means over seeds.",
        f"A heat map of test accuracy by method and {word}; the table below it has the numbers.",
        heat_map(heat, WIDE, low=0, high=100, cell=26, key="accuracy, %"),
        heat_map(heat, NARROW, low=0, high=100, cell=26, key="accuracy, %"),
        hover=[heat.hover()], table=Table(["method", *labels], rows),
    )  # fmt: skip
    heats = [one for method in chapter.methods if (one := _by_round(method, pick, labels, word)) is not None]
    if not heats:
        return [end]
    cell = 13.0 if len(labels) <= 12 else max(2.0, 160 / len(labels))
    by_round = Figure(
        f"{word}-accuracy-by-round", f"Accuracy by {word} and round",
        f"A row is a {word}; stripes mean that rounds undo each other's work. First seed of each method.",
        f"For each method a heat map of accuracy by {word} and round.",
        heat_maps(heats, WIDE, low=0, high=100, cell=cell, key="accuracy, %"),
        heat_maps(heats, NARROW, low=0, high=100, cell=cell, key="accuracy, %"),
        hover=[one.hover() for one in heats],
    )  # fmt: skip
    return [end, by_round]


def _by_round(method: Method, pick: Pick, labels: list[str], word: str) -> Heat | None:
    records = [record for record in method.runs[0].evaluated if pick(record)]
    if len(records) < 2:
        return None
    records = records[:: math.ceil(len(records) / 120)]
    columns = [str(record["round"]) for record in records]
    lists = [list(pick(record) or []) for record in records]
    rows = [
        [100 * v if place < len(one) and (v := one[place]) is not None else None for one in lists]
        for place in range(len(labels))
    ]
    return Heat(labels, columns, rows, method.name, word, "round", " %")
