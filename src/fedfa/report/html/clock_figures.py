"""Figures of runs on a clock: accuracy over virtual time, who did what when, how old contributions were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.report.html.chart import (
    NARROW,
    SMALL,
    WIDE,
    Figure,
    LegendEntry,
    Scale,
    Table,
    draw_legend,
    number,
    tick_texts,
    ticks,
)
from fedfa.report.html.drawing import Boxes, Dots, Drawing, Line, Text
from fedfa.report.html.figures import MethodStyles, line_figure, targets_of
from fedfa.report.html.grouping import Chapter, MethodRuns, common_rounds
from fedfa.report.html.line_charts import Axis, Series

_MAX_ROWS = 40
"""Visits in a chart."""
_PHASES = (("download", "s0"), ("training", "s1"), ("upload", "s2"))
_ENDS = {"late": ("cut off", "s5", "square"), "offline": ("left", "s7", "triangle")}


def clock_figures(chapter: Chapter, method_styles: MethodStyles) -> list[Figure]:
    """All figures of the runs that have a clock; none without one."""
    methods = [
        method for method in chapter.methods if all("time" in run.metrics[0] for run in method.runs if run.metrics)
    ]
    methods = [method for method in methods if any(run.metrics for run in method.runs)]
    if not methods:
        return []
    figures = [_accuracy(methods, method_styles)] if any(run.evaluated for m in methods for run in m.runs) else []
    figures += [figure for method in methods if (figure := _timeline(method)) is not None][:4]
    stale = [(method, ages) for method in methods if (ages := _ages(method))]
    if stale:
        series = [Series(method.name, method_styles[method.name], _shares(ages)) for method, ages in stale]
        axes = Axis("server steps between download and arrival", low=0, whole=True), Axis("contributions, %", low=0)
        figures.append(line_figure("staleness", "Staleness of contributions", "", series, *axes, unit=" %", half=True))
    return figures


def reaching_table(chapter: Chapter, targets: Sequence[float]) -> Table | None:
    """Virtual hours and megabytes until the first evaluation with each accuracy; None without a clock."""
    methods = [
        method for method in chapter.methods if any("time" in record for r in method.runs for record in r.metrics)
    ]
    targets = targets_of(chapter, targets)
    if not methods or not targets:
        return None
    rows = []
    for method in methods:
        cells = []
        for target in targets:
            found = [cost for run in method.runs if (cost := cost_to_reach(run, target / 100)) is not None]
            share = f" ({len(found)} of {len(method.runs)})" if 0 < len(found) < len(method.runs) else ""
            hours, megabytes = (fmean(one[at] for one in found) if found else None for at in (0, 1))
            cells += [f"{number(hours)}{share}", number(megabytes)]
        used = [
            record["utilisation"] for r in method.runs for record in r.metrics if record.get("utilisation") is not None
        ]
        rows.append([method.name, *cells, number(100 * fmean(used)) if used else "–"])
    heads = [text for target in targets for text in (f"h to {target:g} %", f"MB to {target:g} %")]
    note = (
        "Virtual hours and megabytes (up and down) until the first evaluation with this accuracy; means over seeds. "
        "Time used: share of the devices' time spent on contributions that counted, not on waiting or lost work."
    )
    return Table(["method", *heads, "time used, %"], rows, note)


def cost_to_reach(run: RecordedRun, target: float) -> tuple[float, float] | None:
    """Virtual hours and megabytes until the first evaluation with at least this accuracy; None if there is none."""
    total = 0.0
    for record in run.metrics:
        total += (record["bytes_up"] + record["bytes_down"]) / 1e6
        if record.get("accuracy") is not None and record["accuracy"] >= target and "final_pass" not in record:
            return record["time"] / 3600, total
    return None


def _accuracy(methods: Sequence[MethodRuns], method_styles: MethodStyles) -> Figure:
    series = []
    for method in methods:
        each = [
            {int(r["round"]): r for r in run.metrics if r.get("accuracy") is not None and "final_pass" not in r}
            for run in method.runs
        ]
        seeds = [one for one in each if one]
        points = [
            (fmean(one[at]["time"] for one in seeds) / 3600, 100 * fmean(one[at]["accuracy"] for one in seeds))
            for at in common_rounds(each)
        ]
        series.append(Series(method.name, method_styles[method.name], points))
    axes = Axis("virtual hours", low=0), Axis("test accuracy, %", low=0, high=100)
    return line_figure("accuracy-by-virtual-time", "Accuracy by virtual time", "", series, *axes, unit=" %")


def _ages(method: MethodRuns) -> Counter[int]:
    return Counter(age for run in method.runs for record in run.metrics for age in record.get("staleness", ()))


def _shares(ages: Mapping[int, int]) -> list[tuple[float, float]]:
    total = sum(ages.values())
    return [(float(age), 100 * ages.get(age, 0) / total) for age in range(max(ages) + 1)]


def _timeline(method: MethodRuns) -> Figure | None:
    """The first visits of the first run: one row each, with its phases and how it ended."""
    records = [record for record in method.runs[0].metrics if record.get("timeline")]
    visits = [visit for record in records for visit in record["timeline"]][:_MAX_ROWS]
    if not visits:
        return None
    steps = [record["time"] for record in records]
    counts = Counter(visit[6] for visit in visits)
    ended = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return Figure(
        f"timeline-{method.name}",
        f"The first visits of {method.name}",
        "One row per visit of a client. Vertical lines are server steps.",
        f"Bars over virtual seconds, one row for each of {len(visits)} visits: download, training, upload; {ended}.",
        _gantt(visits, steps, WIDE),
        _gantt(visits, steps, NARROW),
        table=Table(
            ["client", "model of round", "start", "downloaded", "trained", "end", "outcome"],
            [[str(v[0]), str(v[1] + 1), *(number(at) for at in v[2:6]), str(v[6])] for v in visits],
        ),
    )


def _gantt(visits: Sequence[Sequence[Any]], steps: Sequence[float], width: float) -> Drawing:
    row, left, top = 13.0, 74.0, 8.0
    bottom = top + row * len(visits)
    first, last = min(visit[2] for visit in visits), max(visit[5] for visit in visits)
    across = Scale(first, last, left, width - 12)
    drawing = Drawing(width, bottom + 40)
    marks = ticks(first, last, 6 if width == WIDE else 3)
    for at, text in zip(marks, tick_texts(marks), strict=True):
        drawing.add(Text((across(at), bottom + 16), text, "muted", SMALL, "middle"))
    drawing.add(Text((left, bottom + 32), "virtual seconds", "muted", SMALL))
    drawing.add(
        Line([[(across(at), top), (across(at), bottom)] for at in steps if first <= at <= last] or [[]], "grid")
    )
    boxes: dict[str, list[tuple[float, float, float, float]]] = {colour: [] for _, colour in _PHASES}
    ends: dict[str, list[tuple[float, float]]] = {outcome: [] for outcome in _ENDS}
    for place, (client, _, *moments, outcome) in enumerate(visits):
        y = top + place * row
        drawing.add(Text((left - 6, y + row - 3), f"client {client}", "muted", SMALL, "end"))
        for (_, colour), begin, end in zip(_PHASES, moments, moments[1:], strict=False):
            boxes[colour].append((across(begin), y + 2, max(0.0, across(end) - across(begin)), row - 4))
        if outcome in ends:
            ends[outcome].append((across(moments[3]), y + row / 2))
    drawing.add(*(Boxes(own, colour) for colour, own in boxes.items()))
    drawing.add(*(Dots(own, _ENDS[outcome][1], 4.0, _ENDS[outcome][2]) for outcome, own in ends.items() if own))
    entries = [LegendEntry(name, colour, shape="square") for name, colour in _PHASES]
    entries += [
        LegendEntry(name, colour, shape=shape) for outcome, (name, colour, shape) in _ENDS.items() if ends[outcome]
    ]
    drawing.height = draw_legend(drawing, entries, bottom + 40, width)
    return drawing
