"""Figures of a tuning (``fedfa tune``): its trials as parallel coordinates, and the importance of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.experiment.files import read_json
from fedfa.experiment.layers import value_text
from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.experiment.tuning import TRIALS
from fedfa.report.html.chart import (
    NARROW,
    SMALL,
    TEXT,
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
from fedfa.report.html.drawing import Boxes, Dots, Drawing, Line, Point, Text, shorten, text_width
from fedfa.report.html.grouping import Chapter
from fedfa.report.html.palette import step_role

_BEST, _FAILED = "s0", "muted"


def tuning_record(chapter: Chapter) -> Mapping[str, Any] | None:
    """What ``fedfa tune`` wrote about the trials of a chapter; None if they are no trials, or not all are done."""
    file = Path(chapter.group).parent / TRIALS
    if not chapter.group or Path(chapter.group).name != "trials" or not file.is_file():
        return None
    found: Mapping[str, Any] = read_json(file)
    return found


def still_training(runs: Iterable[RecordedRun]) -> list[RecordedRun]:
    """The runs that are not finished; trials of a tuning that is done stay where they were left behind."""
    return [run for run in runs if not run.finished and not _is_trial_of_finished_tuning(run)]


def _is_trial_of_finished_tuning(run: RecordedRun) -> bool:
    return run.path.parent.name == "trials" and (run.path.parent.parent / TRIALS).is_file()


def tuning_figures(record: Mapping[str, Any]) -> list[Figure]:
    """The trials, and where it was measured the importance of the parameters."""
    return [_trials(record), *([_importance(record)] if record["importance"] else [])]


@dataclass(frozen=True)
class _Axis:
    """One axis of the parallel coordinates: where values lie between 0 and 1, and the labelled values."""

    title: str
    share: Callable[[Any], float]
    marks: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class _Trace:
    """The line of a trial: its places on the axes, as far as it came."""

    shares: Sequence[float]
    colour: str
    width: float = 1.4
    dash: tuple[float, ...] = ()


def _parameter_axis(parameter: Mapping[str, Any]) -> _Axis:
    if choices := [value_text(one) for one in parameter["choices"]]:
        places = {text: place / (len(choices) - 1) for place, text in enumerate(choices)}
        return _Axis(parameter["key"], lambda value: places[value_text(value)], [(places[one], one) for one in choices])
    low, high = float(parameter["low"]), float(parameter["high"])
    if not parameter["log"]:
        scale = Scale(low, high, 0.0, 1.0)
        values = ticks(low, high, 4, whole=isinstance(parameter["low"], int))
        return _Axis(
            parameter["key"], scale, [(scale(at), t) for at, t in zip(values, tick_texts(values), strict=True)]
        )
    scale = Scale(math.log(low), math.log(high), 0.0, 1.0)
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    decades = [10.0**power for power in range(first, last + 1)]
    values = decades if len(decades) > 1 else [low, high]
    return _Axis(
        parameter["key"], lambda value: scale(math.log(value)), [(scale(math.log(at)), f"{at:g}") for at in values]
    )


def _score_axes(record: Mapping[str, Any], sign: int) -> list[_Axis]:
    """An axis per rung, all of one scale: what trials gain from more rounds can be read."""
    found = [sign * mean for one in record["trials"] for mean in one["by_rung"].values()]
    values = ticks(min(found), max(found), 4)
    scale = Scale(min(*found, *values), max(*found, *values), 0.0, 1.0)
    marks = [(scale(at), text) for at, text in zip(values, tick_texts(values), strict=True)]
    return [
        _Axis(f"{record['monitor']} after {rung}", lambda mean: scale(sign * mean), marks) for rung in record["rungs"]
    ]


def _trials(record: Mapping[str, Any]) -> Figure:
    sign = -1 if record["lower_is_better"] else 1
    trials, rungs = record["trials"], record["rungs"]
    keys = [one["key"] for one in record["parameters"]]
    axes = [*map(_parameter_axis, record["parameters"]), *_score_axes(record, sign)]
    best = next(one for one in trials if one["scores"])
    chosen = ", ".join(f"{key} {_text(best['values'][key])}" for key in keys)
    score = number(sign * sum(best["scores"]) / len(best["scores"]))
    several = f" after {', '.join(map(str, rungs))} rounds, as far as it was trained" if len(rungs) > 1 else ""
    caption = (
        f"Each line is a trial: its values, then its {record['monitor']} on validation samples "
        f"({record['validation']}){several}. Darker lines did better after {rungs[0]}. "
        f"The best of {len(trials)}: {chosen}; {record['monitor']} {score}."
    )
    failed = sum(not one["by_rung"] for one in trials)
    entries = [LegendEntry(f"trial {best['trial']}, the best", _BEST)]
    entries += [LegendEntry(f"failed: {failed}", _FAILED, (4, 3))] if failed else []
    traces = [_trace(record, axes, one, is_best=one is best) for one in reversed(trials)]  # the best on top
    header = ["trial", *keys, *(axis.title for axis in axes[len(keys) :]), "failed"]
    rows = [
        [str(one["trial"]), *(_text(one["values"][key]) for key in keys),
         *(number(sign * one["by_rung"][str(rung)]) if str(rung) in one["by_rung"] else "" for rung in rungs),
         one.get("failed", "")]
        for one in trials
    ]  # fmt: skip
    return Figure(
        "trials", "Trials", caption,
        f"Parallel coordinates of {len(trials)} trials: {'; '.join(axis.title for axis in axes)}. Best: {chosen}.",
        _standing(axes, traces, entries), _lying(axes, traces, entries), table=Table(header, rows),
    )  # fmt: skip


def _trace(record: Mapping[str, Any], axes: Sequence[_Axis], trial: Mapping[str, Any], *, is_best: bool) -> _Trace:
    values = [trial["values"][one["key"]] for one in record["parameters"]]
    values += [trial["by_rung"][str(rung)] for rung in record["rungs"] if str(rung) in trial["by_rung"]]
    shares = [axis.share(value) for axis, value in zip(axes, values, strict=False)]
    if is_best:
        return _Trace(shares, _BEST, 2.6)
    if not trial["by_rung"]:
        return _Trace(shares, _FAILED, 1.2, (4, 3))
    first = str(record["rungs"][0])
    found = [one["by_rung"][first] for one in record["trials"] if one["by_rung"]]
    scale = Scale(min(found), max(found), 0.25, 0.95)  # the palest steps cannot be seen as lines
    return _Trace(shares, step_role("q", scale(trial["by_rung"][first])))


def _standing(axes: Sequence[_Axis], traces: Sequence[_Trace], entries: Sequence[LegendEntry]) -> Drawing:
    """Axes side by side, with their titles above."""
    side, top, length = 64.0, 40.0, 300.0
    pitch = (WIDE - 2 * side) / (len(axes) - 1)
    drawing = Drawing(WIDE, top + length + 16)

    def at(axis: int, share: float) -> Point:
        return side + axis * pitch, top + (1 - share) * length

    _draw(drawing, axes, traces, at)
    for place, axis in enumerate(axes):
        title = shorten(axis.title, pitch - 8, TEXT)
        half = text_width(title, TEXT) / 2
        middle = min(max(at(place, 0)[0], half + 2), WIDE - half - 2)
        drawing.add(Text((middle, 20), title, "ink", TEXT, "middle"))
        for share, text in axis.marks:
            x, y = at(place, share)
            drawing.add(Line([[(x - 4, y), (x + 4, y)]], "muted"))
            _label(drawing, (x - 8 - text_width(text, SMALL), y + 4), text, "muted", SMALL)
    drawing.height = draw_legend(drawing, entries, drawing.height + 4, WIDE)
    return drawing


def _lying(axes: Sequence[_Axis], traces: Sequence[_Trace], entries: Sequence[LegendEntry]) -> Drawing:
    """For a phone: axes one below the other, where their titles have the whole width."""
    top, pitch, side = 36.0, 74.0, 14.0
    drawing = Drawing(NARROW, top + pitch * (len(axes) - 1) + 24)

    def at(axis: int, share: float) -> Point:
        return side + share * (NARROW - 2 * side), top + axis * pitch

    _draw(drawing, axes, traces, at)
    for place, axis in enumerate(axes):
        _label(drawing, (4, at(place, 0)[1] - 10), shorten(axis.title, NARROW - 8, TEXT), "ink", TEXT)
        for share, text in axis.marks:
            x, y = at(place, share)
            half = text_width(text, SMALL) / 2
            middle = min(max(x, half + 1), NARROW - half - 1)
            drawing.add(
                Line([[(x, y - 4), (x, y + 4)]], "muted"), Text((middle, y + 16), text, "muted", SMALL, "middle")
            )
    drawing.height = draw_legend(drawing, entries, drawing.height + 4, NARROW)
    return drawing


def _draw(drawing: Drawing, axes: Sequence[_Axis], traces: Sequence[_Trace], at: Callable[[int, float], Point]) -> None:
    drawing.add(Line([[at(place, 0), at(place, 1)] for place in range(len(axes))], "faint", 1.2))
    for trace in traces:
        points = [at(place, share) for place, share in enumerate(trace.shares)]
        drawing.add(Line([points], trace.colour, trace.width, trace.dash))
        drawing.add(Dots([points[-1]], trace.colour, 1.2 + trace.width))


def _label(drawing: Drawing, at: Point, text: str, colour: str, size: float) -> None:
    """A text that stays readable where lines cross it."""
    ground = (at[0] - 1, at[1] - 0.85 * size, text_width(text, size) + 2, 1.1 * size)
    drawing.add(Boxes([ground], "surface", opacity=0.8), Text(at, text, colour, size))


def _importance(record: Mapping[str, Any]) -> Figure:
    shares = {key: 100 * share for key, share in record["importance"].items()}
    listed = ", ".join(f"{key} {number(share, 0)} %" for key, share in shares.items())
    return Figure(
        "importance", "Importance of the parameters",
        f"Share of the spread of {record['monitor']} after {record['rungs'][0]} rounds that each parameter explains by "
        "itself, estimated by functional ANOVA. With few trials it is rough.",
        f"Bars: {listed}.", _bars(shares, WIDE), _bars(shares, NARROW),
        table=Table(["parameter", "share, %"], [[key, number(share, 1)] for key, share in shares.items()]),
    )  # fmt: skip


def _bars(shares: Mapping[str, float], width: float) -> Drawing:
    """Lying bars with their names above and their values at the end."""
    row, bar = 44.0, 14.0
    drawing = Drawing(width, row * len(shares) + 4)
    across = Scale(0.0, 100.0, 4.0, min(width, 620.0) - 56)
    for place, (key, share) in enumerate(shares.items()):
        top = place * row
        drawing.add(
            Text((4, top + 15), shorten(key, width - 8, TEXT), "ink", TEXT),
            Boxes([(4.0, top + 22, max(across(share) - 4, 1.0), bar)], "s1"),
            Text((across(share) + 6, top + 22 + bar - 3), f"{number(share, 0)} %", "muted", TEXT),
        )
    return drawing


def _text(value: Any) -> str:
    """A value of a parameter as it is shown."""
    return f"{value:.3g}" if isinstance(value, float) else value_text(value)
