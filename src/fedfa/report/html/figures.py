"""The figures of a chapter: accuracy, costs, split of the data, accuracy by class and by domain."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import Any

from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.report.html.chart import HALF, NARROW, WIDE, Figure, Table, number, ticks
from fedfa.report.html.data_split import Split
from fedfa.report.html.grouping import Chapter, CurvePoint, MethodRuns, common_rounds
from fedfa.report.html.heat_maps import ColourScale, Heat, heat_maps
from fedfa.report.html.line_charts import Axis, Panel, Series, hover_lines, line_chart, multiples, y_values
from fedfa.report.html.palette import Style

MethodStyles = Mapping[str, Style]
_MAX_LINES = 5
"""With more methods than this, each is also shown in a chart of its own."""
_CLOSE = 0.4
"""Lines that vary less than this share of the axis in the second half get a chart of that half."""
_LOSS_LIMIT = 4
"""A loss is drawn up to this multiple of the first one; the table has the values beyond."""
_LOSS_CAPTIONS = {
    "loss": "Of the evaluated model.",
    "train_loss": "Mean over the round's clients; a method that adds terms to the loss has them in it.",
}
_MAX_ROWS = 60
"""Rows of a data table; longer curves are subsampled evenly."""


def slug(text: str) -> str:
    """Convert a text to a file name.

    Example:
        >>> slug("Fashion-MNIST, 100 clients")
        'fashion-mnist-100-clients'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "figure"


def band_note(methods: Sequence[MethodRuns]) -> str:
    """What lines and bands mean."""
    if all(len(method.runs) == 1 for method in methods):
        return "One seed each: lines also differ by chance."
    return "Lines are means over seeds, bands range from the lowest to the highest seed."


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
    """A line chart for wide and narrow pages, with its table."""
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
    """The values of lines, a row for each x value."""
    places = sorted({point[0] for one in series for point in one.points})
    note = ""
    if len(places) > _MAX_ROWS:
        every = math.ceil(len(places) / _MAX_ROWS)
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
        rows.append(["after the final pass", *(number(one[1]) if one else "" for one in after)])
    return Table([x, *(one.name for one in series)], rows, note)


def as_series(name: str, line_style: Style, curve: Sequence[CurvePoint], factor: float = 1.0) -> Series:
    """Convert a curve over seeds to a line with its band."""
    points = [(point.x, factor * point.mean) for point in curve]
    band = [(factor * point.low, factor * point.high) for point in curve]
    return Series(name, line_style, points, band if any(low < high for low, high in band) else None)


# -- accuracy ---------------------------------------------------------------------------------------------------------
def accuracy_series(chapter: Chapter, method_styles: MethodStyles) -> list[Series]:
    """Accuracy by round, in percent; without methods that have no evaluation."""
    lines = []
    for method in chapter.methods:
        line = as_series(method.name, method_styles[method.name], method.curve(lambda r: r["accuracy"]), 100)
        after = method.after_final_pass()
        if line.points:
            lines.append(replace(line, after=(after[0], 100 * after[1]) if after else None))
    return lines


def accuracy_figures(chapter: Chapter, method_styles: MethodStyles) -> list[Figure]:
    """Accuracy by round: all lines together and, if there are many, each in front of the others."""
    series = accuracy_series(chapter, method_styles)
    if not series:
        return []
    x, y = Axis("round", low=0, whole=True), Axis(f"{chapter.evaluated_on} accuracy, %", low=0, high=_ceiling(series))
    diamond = " A diamond marks the accuracy after the final pass." if any(one.after for one in series) else ""
    caption = f"{band_note(chapter.methods)}{diamond}{_same_lines(series)}"
    together = line_figure("accuracy", "Accuracy by round", caption, series, x, y, unit=" %", height=420)
    close = _zoomed(series, x, y)
    if len(series) <= _MAX_LINES:
        return [together, *close]
    panels = [Panel(one.name, [one], [other for other in series if other is not one]) for one in series]
    each = Figure(
        "accuracy-each", "Each method in front of the others",
        "The same curves; grey ones are the other methods.",
        "The curves of the chart above in small charts, one for each method.",
        multiples(panels, x, y, WIDE), multiples(panels, x, y, NARROW, panel_width=172),
        hover=[hover_lines([one], x.label, " %") for one in series],
    )  # fmt: skip
    return [together, *close, each]


def _zoomed(series: Sequence[Series], x: Axis, y: Axis) -> list[Figure]:
    """The second half of the rounds on axes of its own, where lines lie close together on those of the whole."""
    last = max(one.points[-1][0] for one in series)
    late = [replace(one, points=[p for p in one.points if 2 * p[0] >= last]) for one in series]
    late = [
        replace(new, band=None if old.band is None else list(old.band[-len(new.points) :]))
        for old, new in zip(series, late, strict=True)
        if len(new.points) > 1
    ]
    values = y_values(late)
    if len(late) < 2 or max(len(one.points) for one in late) < 5:
        return []
    if max(values) - min(values) > _CLOSE * max(y_values(series)):
        return []
    start = min(one.points[0][0] for one in late)
    axes = Axis(x.label, low=start, whole=True), Axis(y.label)
    title = f"From round {start:.0f} on"
    caption = "The same lines, on axes that fit them: the vertical one does not begin at 0."
    return [line_figure("accuracy-late", title, caption, late, *axes, unit=" %", height=360)]


# -- loss -------------------------------------------------------------------------------------------------------------
def loss_figures(chapter: Chapter, method_styles: MethodStyles) -> list[Figure]:
    """Loss on the test set and in local training by round; a divergence shows here first."""
    figures = []
    for name, key, title in (
        ("loss", "loss", "Test loss by round"),
        ("train-loss", "train_loss", "Training loss by round"),
    ):
        records = "evaluated" if key == "loss" else "trained"
        series = [
            line
            for method in chapter.methods
            if (line := as_series(method.name, method_styles[method.name], method.curve(_finite(key), records))).points
        ]
        if not series:
            continue
        starts = [one.points[0][1] for one in series]
        limit = _LOSS_LIMIT * max(starts)
        highest = max(y_values(series))
        shown, caption = series, _LOSS_CAPTIONS[key]
        if highest > limit > 0:
            shown = [_cut(one, limit) for one in series]
            over = [one.name for one in series if max(y_values([one])) > limit]
            caption += f" Cut at {number(limit)}, {_LOSS_LIMIT} times the first value: {', '.join(over)} went beyond."
        y = Axis("cross-entropy", low=0, high=limit if highest > limit > 0 else None)
        drawn = line_figure(name, title, caption, shown, Axis("round", low=0, whole=True), y, half=True)
        exact = [hover_lines(series, "round", "")]
        figures.append(replace(drawn, hover=exact, table=series_table(series, "round")))
    return figures


def _finite(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    def value(record: Mapping[str, Any]) -> float | None:
        found = record.get(key)
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None

    return value


def _cut(one: Series, limit: float) -> Series:
    band = one.band and [(min(low, limit), min(high, limit)) for low, high in one.band]
    return replace(one, points=[(x, min(y, limit)) for x, y in one.points], band=band)


def _same_lines(series: Sequence[Series]) -> str:
    """Names of lines that coincide."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for one in series:
        groups.setdefault(tuple(one.points), []).append(one.name)
    equal = [f"{', '.join(names[:-1])} and {names[-1]}" for names in groups.values() if len(names) > 1]
    return f" Equal in every round, so that one line covers the others: {'; '.join(equal)}." if equal else ""


def _ceiling(series: Sequence[Series]) -> float:
    """A round percentage above every line."""
    return min(100.0, 10 * math.ceil(max(y_values(series)) / 10 + 1e-9))


# -- costs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Progress:
    """An evaluation of a run with the costs up to then."""

    round: int
    best: float
    seconds: float
    cpu_seconds: float | None
    megabytes: float


def progress(run: RecordedRun) -> list[Progress]:
    """Best accuracy and costs so far, an entry for each evaluation."""
    rounds = [record for record in run.metrics if "final_pass" not in record]
    seconds = list(accumulate(float(record.get("train_seconds", 0)) for record in rounds))
    timed = all(isinstance(record.get("cpu_seconds"), int | float) for record in rounds)
    cpu = list(accumulate(float(record["cpu_seconds"]) for record in rounds)) if timed else [None] * len(rounds)
    megabytes = list(accumulate((record.get("bytes_up", 0) + record.get("bytes_down", 0)) / 1e6 for record in rounds))
    best, entries = 0.0, []
    for place, record in enumerate(rounds):
        if record.get("accuracy") is not None:
            best = max(best, record["accuracy"])
            entries.append(Progress(int(record["round"]), best, seconds[place], cpu[place], megabytes[place]))
    return entries


def cost_figures(chapter: Chapter, method_styles: MethodStyles) -> list[Figure]:
    """Best accuracy so far against seconds and against megabytes."""
    figures = []
    for name, label, cost in (
        ("accuracy-by-time", "seconds of training", "seconds"),
        ("accuracy-by-bytes", "megabytes, both ways", "megabytes"),
    ):
        series = []
        for method in chapter.methods:
            each = [{entry.round: entry for entry in progress(run)} for run in method.runs]
            seeds = [one for one in each if one]
            points = [
                (fmean(getattr(one[at], cost) for one in seeds), 100 * fmean(one[at].best for one in seeds))
                for at in common_rounds(each)
            ]
            if points:
                series.append(Series(method.name, method_styles[method.name], points))
        if series:
            axes = (
                Axis(label, low=0),
                Axis(f"best {chapter.evaluated_on} accuracy so far, %", low=0, high=_ceiling(series)),
            )
            title = f"Best accuracy so far by {label}"
            figures.append(line_figure(name, title, "", series, *axes, unit=" %", half=True))
    return figures


@dataclass(frozen=True)
class Reach:
    """Costs of reaching an accuracy: means over the seeds that reached it."""

    rounds: float
    seconds: float
    cpu_seconds: float | None
    megabytes: float
    seeds: int
    of: int


def reach(method: MethodRuns, target: float) -> Reach | None:
    """Costs until the first evaluation with at least the target (a share, not percent); None if there is none."""
    first = [next((entry for entry in progress(run) if entry.best >= target), None) for run in method.runs]
    reached = [entry for entry in first if entry is not None]
    if not reached:
        return None
    rounds, seconds, megabytes = (
        fmean(getattr(entry, cost) for entry in reached) for cost in ("round", "seconds", "megabytes")
    )
    cpu = [entry.cpu_seconds for entry in reached if entry.cpu_seconds is not None]
    timed = fmean(cpu) if len(cpu) == len(reached) else None  # older records lack it
    return Reach(rounds, seconds, timed, megabytes, len(reached), len(method.runs))


def targets_of(chapter: Chapter, asked: Sequence[float]) -> list[float]:
    """Target accuracies in percent: the given ones, or up to three round ones that some method reaches."""
    if asked:
        return sorted(set(asked))
    best = max((100 * r["accuracy"] for run in chapter.runs for r in run.evaluated), default=0.0)
    first = min((100 * run.evaluated[0]["accuracy"] for run in chapter.runs if run.evaluated), default=0.0)
    for step in (10.0, 5.0, 2.0, 1.0):
        found = [mark for mark in ticks(0, 100, round(100 / step)) if first < mark <= best]
        if len(found) >= 3:
            return found[-3:]
    return found


# -- the split --------------------------------------------------------------------------------------------------------
def split_figure(split: Split) -> Figure:
    """Clients × classes."""
    numbers = split.numbers
    biggest = max((count for row in split.counts for count in row), default=1) or 1
    # A class that a client lacks stays empty.
    by_class = [[row[label] or None for row in split.counts] for label in range(len(split.classes))]
    heat = Heat(
        split.classes, [str(client) for client in split.shown], by_class, row_word="class", column_word="client",
        unit=" samples",
    )  # fmt: skip
    cell = 22.0 if len(split.classes) <= 20 else max(4.0, 400 / len(split.classes))

    def draw(width: float) -> Any:
        return heat_maps([heat], width, ColourScale(0, biggest, "samples", root=True), cell=cell)

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
def _accuracies(records: Sequence[Mapping[str, Any]], word: str, labels: list[str]) -> dict[int, list[float | None]]:
    """The accuracies by class or domain of the evaluations that have them, in percent, by round."""
    found = {}
    for record in records:
        values = record.get(f"{word}_accuracy")
        if values and record.get("accuracy") is not None:
            each = [values.get(name) for name in labels] if isinstance(values, Mapping) else values
            found[int(record["round"])] = [None if value is None else 100 * value for value in each]
    return found


def _last_values(method: MethodRuns, word: str, labels: list[str]) -> list[float | None]:
    """Values of the last evaluation (of the final pass, if there is one), mean over seeds."""
    found = (list(_accuracies(run.metrics, word, labels).values()) for run in method.runs)
    seeds = [values[-1] for values in found if values]
    columns = ([value for value in column if value is not None] for column in zip(*seeds, strict=False))
    return [fmean(values) if values else None for values in columns]


def class_figures(chapter: Chapter, names: Sequence[str]) -> list[Figure]:
    """Accuracy by class: at the end and by round."""
    count = max((len(r.get("class_accuracy") or []) for run in chapter.runs for r in run.evaluated), default=0)
    labels = list(names) if len(names) == count else [str(label) for label in range(count)]
    return _category_figures(chapter, labels, "class")


def domain_figures(chapter: Chapter) -> list[Figure]:
    """Accuracy by domain, if there are several."""
    found = [r["domain_accuracy"] for run in chapter.runs for r in run.evaluated if r.get("domain_accuracy")]
    names = list(dict.fromkeys(name for one in found for name in one))
    return _category_figures(chapter, names, "domain")


def _category_figures(chapter: Chapter, labels: list[str], word: str) -> list[Figure]:
    values = {method.name: _last_values(method, word, labels) for method in chapter.methods}
    values = {name: row for name, row in values.items() if row}
    if not values or len(labels) < 2:
        return []
    scale = ColourScale(0, 100, "accuracy, %")
    heat = Heat(list(values), labels, list(values.values()), row_word="method", column_word=word, unit=" %")
    rows = [[name, *(number(v, 1) for v in row)] for name, row in values.items()]
    end = Figure(
        f"{word}-accuracy", f"Accuracy by {word} at the end",
        f"Percent of each {word}'s test samples, at the last evaluation; means over seeds.",
        f"A heat map of test accuracy by method and {word}; the table below it has the numbers.",
        heat_maps([heat], WIDE, scale, cell=26, digits=0), heat_maps([heat], NARROW, scale, cell=26, digits=0),
        hover=[heat.hover()], table=Table(["method", *labels], rows),
    )  # fmt: skip
    heats = [one for method in chapter.methods if (one := _by_round(method, labels, word)) is not None]
    if not heats:
        return [end]
    cell = 13.0 if len(labels) <= 12 else max(2.0, 160 / len(labels))
    by_round = Figure(
        f"{word}-accuracy-by-round", f"Accuracy by {word} and round",
        f"A row is a {word}; vertical stripes mean that rounds undo each other's progress. First seed of each method.",
        f"For each method a heat map of accuracy by {word} and round.",
        heat_maps(heats, WIDE, scale, cell=cell), heat_maps(heats, NARROW, scale, cell=cell),
        hover=[one.hover() for one in heats],
    )  # fmt: skip
    return [end, by_round]


def _by_round(method: MethodRuns, labels: list[str], word: str) -> Heat | None:
    found = _accuracies(method.runs[0].evaluated, word, labels)
    if len(found) < 2:
        return None
    shown = list(found)[:: math.ceil(len(found) / 120)]
    rows = [[found[at][place] if place < len(found[at]) else None for at in shown] for place in range(len(labels))]
    return Heat(labels, [str(at) for at in shown], rows, method.name, word, "round", " %")
