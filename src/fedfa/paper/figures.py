"""Figure of a study, drawn from run directories: accuracy, or what the diagnostics measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfa.diagnostics.records import DiagnosticsRecords
from fedfa.errors import FedfaError, RunError
from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.paper.cells import Place
from fedfa.paper.declarations import Column, Row, Study, reading
from fedfa.paper.run_index import RunIndex

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""P. Tol's bright scheme, distinct with the common forms of colour blindness."""
MARKS = ("o", "s", "^", "D", "v", "P", "*", "X", "<", ">")
CLASS_COLOURS = "tab10"


@dataclass(frozen=True)
class FigureRuns:
    """The runs of a figure: the finished ones of every cell, of one length, under one reading."""

    study: Study
    runs: Mapping[tuple[str, str], Sequence[RecordedRun]]
    """By column and row."""
    rounds: int
    reading: str

    @classmethod
    def of(cls, study: Study, runs: RunIndex, reading_name: str, rounds: int | None = None) -> FigureRuns:
        """The finished runs of a study.

        Raises:
            RunError: There are none.
        """
        reading(reading_name)
        length = rounds or study.rounds
        found = {
            (column.name, row.name): runs.finished(Place(study, column, row, reading_name), length)
            for column in study.columns
            for row in study.rows_of(column)
        }
        if not any(found.values()):
            shorter = "" if length == study.rounds else f" --rounds {length}"
            raise RunError(f"no run of {study.name} is finished; first: fedfa paper run {study.name}{shorter}")
        return cls(study, found, length, reading_name)

    def at(self, column: Column, row: Row) -> Sequence[RecordedRun]:
        """The runs of a cell."""
        return self.runs.get((column.name, row.name), ())

    def rows_with_runs(self, columns: Sequence[Column]) -> list[Row]:
        """The rows with a run in at least one of these columns."""
        return [row for row in self.study.rows if any(self.at(column, row) for column in columns)]

    def columns_with_runs(self) -> list[Column]:
        """The columns with a run."""
        return [column for column in self.study.columns if any(self.at(column, row) for row in self.study.rows)]

    def colour(self, row: Row) -> str:
        """The colour of a row, the same in all panels."""
        return COLOURS[[one.name for one in self.study.rows].index(row.name) % len(COLOURS)]

    def missing(self) -> list[str]:
        """The cells without a run."""
        return [f"{column}/{row}" for (column, row), found in self.runs.items() if not found]


def draw_figure(shown: FigureRuns, paths: Sequence[Path]) -> None:
    """Draw a study's figure.

    Args:
        shown: The runs to draw.
        paths: Files to write; their suffixes choose the formats (.svg, .png, .pdf).

    Raises:
        FedfaError: matplotlib is not installed.
        RunError: A run has no diagnostics.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise FedfaError("figures need matplotlib: pip install 'fedfa[plots]'") from None
    assert shown.study.picture is not None
    # Fixed salt and no date: the same runs give the same file.
    with mpl.rc_context({"svg.hashsalt": "fedfa", "font.size": 9}):
        figure = _DRAW[shown.study.picture.draw](shown)
        fewer = "" if shown.rounds == shown.study.rounds else f", only {shown.rounds} of {shown.study.rounds} rounds"
        seeds = sorted({run.seed for found in shown.runs.values() for run in found})
        named = "seed" if len(seeds) == 1 else "seeds"
        figure.suptitle(f"{shown.study.title}\n{named} {', '.join(map(str, seeds))}{fewer}", fontsize=10)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            extra: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=150, **extra)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (0 for a single seed)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


# -- accuracy ---------------------------------------------------------------------------------------------------------
def _curves(shown: FigureRuns) -> Figure:
    """Accuracy by round, a panel per column; the band is the mean ± one standard deviation over seeds."""
    columns = shown.columns_with_runs()
    figure, panels = _panels(1, len(columns), width=4.2, height=3.4)
    for axes, column in zip(panels[0], columns, strict=True):
        for row in shown.rows_with_runs([column]):
            rounds, mean, spread = accuracy_by_round(shown.at(column, row))
            _band(axes, rounds, mean, spread, shown.colour(row), row.title)
        _label(axes, column.title, "round", "test accuracy, %")
        axes.legend(fontsize=8)
    return figure


def accuracy_by_round(runs: Sequence[RecordedRun]) -> tuple[list[int], list[float], list[float]]:
    """Rounds that all runs evaluated, with mean and standard deviation of the accuracies in percent."""
    return _over_seeds(
        {r["round"]: 100 * r["accuracy"] for r in run.metrics if r["accuracy"] is not None} for run in runs
    )


def _over_seeds(each: Iterable[Mapping[int, float]]) -> tuple[list[int], list[float], list[float]]:
    """Rounds that all seeds have, with mean and standard deviation over seeds."""
    each = list(each)
    rounds = sorted(set.intersection(*(set(one) for one in each)))
    points = [mean_and_spread([one[r] for one in each]) for r in rounds]
    return rounds, [mean for mean, _ in points], [spread for _, spread in points]


def _lines(shown: FigureRuns) -> Figure:
    """Final accuracy by column, a panel per group of columns."""
    with_runs = shown.columns_with_runs()
    groups = {name: [c for c in columns if c in with_runs] for name, columns in shown.study.groups().items()}
    groups = {name: columns for name, columns in groups.items() if columns}
    figure, panels = _panels(1, len(groups), width=4.2, height=3.4)
    for axes, (group, columns) in zip(panels[0], groups.items(), strict=True):
        for number, row in enumerate(shown.rows_with_runs(columns)):
            there = [(place, shown.at(column, row)) for place, column in enumerate(columns) if shown.at(column, row)]
            points = [(place, *mean_and_spread([run.accuracy() for run in found])) for place, found in there]
            axes.errorbar(
                [p[0] for p in points], [p[1] for p in points], yerr=[p[2] for p in points], label=row.title,
                color=shown.colour(row), marker=MARKS[number % len(MARKS)], capsize=3, linewidth=1.6,
            )  # fmt: skip
        axes.set_xticks(range(len(columns)), [column.title for column in columns])
        _label(axes, "", group, "test accuracy, %")
        axes.legend(fontsize=8)
    return figure


# -- diagnostics ------------------------------------------------------------------------------------------------------
def _diagnostics(shown: FigureRuns) -> Figure:
    """Two lines of panels per column: t-SNE of each method's features; diagnostics by round."""
    columns = shown.columns_with_runs()
    rows = shown.rows_with_runs(columns)
    figure, panels = _panels(2 * len(columns), max(len(rows), len(DIAGNOSTICS)), width=3.6, height=3.1)
    for number, column in enumerate(columns):
        scatters, curves = panels[2 * number], panels[2 * number + 1]
        for axes in [*scatters[len(rows) :], *curves[len(DIAGNOSTICS) :]]:
            axes.set_axis_off()
        for axes, row in zip(scatters, rows, strict=False):
            _embedding(axes, shown.at(column, row), f"{row.title}: {column.title}")
        for axes, (label, path) in zip(curves, DIAGNOSTICS.items(), strict=False):
            for row in rows:
                if shown.at(column, row):
                    rounds, mean, spread = diagnostic_by_round(shown.at(column, row), path)
                    _band(axes, rounds, mean, spread, shown.colour(row), row.title)
            _label(axes, "", "round", label)
            axes.legend(fontsize=8)
    return figure


DIAGNOSTICS: Mapping[str, tuple[str, str]] = {
    "feature distance between clients\n(share of the features' norm)": ("feature_distance", "relative"),
    "feature distance between clients\n(published code's average)": ("feature_distance", "authors"),
    "cosine of classifier updates\nbetween clients": ("classifier_cosine", "mean"),
}
"""Labels of the curves, and where their values stand in a record."""


def diagnostic_by_round(
    runs: Sequence[RecordedRun], path: tuple[str, str]
) -> tuple[list[int], list[float], list[float]]:
    """One diagnostic by round: mean and standard deviation over seeds.

    Raises:
        RunError: A run has no diagnostics.
    """
    section, key = path
    each = [{record["round"]: record[section][key] for record in _records(run)} for run in runs]
    return _over_seeds({number: value for number, value in one.items() if value is not None} for one in each)


def _records(run: RecordedRun) -> Sequence[Mapping[str, Any]]:
    if run.diagnostics_error:
        raise RunError(f"{run.path}: diagnostics.jsonl cannot be read ({run.diagnostics_error}); run it again")
    if not run.diagnostics:
        raise RunError(f"{run.path} has no diagnostics.jsonl; copy it too if this is a copy, else run it again")
    return run.diagnostics


def _embedding(axes: Axes, runs: Sequence[RecordedRun], title: str) -> None:
    """t-SNE of the clients' features after the last round: a colour per class, a marker per client."""
    axes.set_title(title, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    there = [run for run in runs if DiagnosticsRecords(run.path).shown_rounds()]
    if not there:
        axes.text(0.5, 0.5, "features were not stored", ha="center", va="center", transform=axes.transAxes, fontsize=8)
        return
    import matplotlib as mpl

    from fedfa.diagnostics.embedding import shared_embedding

    embedded = shared_embedding(there[0].path, DiagnosticsRecords(there[0].path).shown_rounds()[-1])
    colours = mpl.colormaps[CLASS_COLOURS]
    for number, client in enumerate(sorted(set(embedded.client.tolist()))):
        mine = embedded.client == client
        axes.scatter(
            embedded.xy[mine, 0], embedded.xy[mine, 1], s=9, marker=MARKS[number % len(MARKS)], linewidths=0,
            c=[colours(label % 10) for label in embedded.label[mine].tolist()], alpha=0.7, rasterized=True,
        )  # fmt: skip
    if embedded.anchors is not None:
        axes.scatter(embedded.anchors[:, 0], embedded.anchors[:, 1], s=60, marker="*", c="black", label="anchors")


def _histograms(shown: FigureRuns) -> Figure:
    """Two lines of panels per column: t-SNE of each method's features; cosines of feature pairs between clients."""
    columns = shown.columns_with_runs()
    rows = shown.rows_with_runs(columns)
    figure, panels = _panels(2 * len(columns), len(rows), width=2.7, height=2.4)
    for number, column in enumerate(columns):
        for scatter, axes, row in zip(panels[2 * number], panels[2 * number + 1], rows, strict=True):
            if not shown.at(column, row):
                scatter.set_axis_off()
                axes.set_axis_off()
                continue
            _embedding(scatter, shown.at(column, row), f"{row.title}\n{column.title}")
            edges, positive, negative = pair_shares(shown.at(column, row))
            for shares, colour, label in ((positive, "#228833", "same class"), (negative, "#aa3377", "other class")):
                axes.stairs(shares, edges, fill=True, color=colour, alpha=0.55, label=label)
            _label(axes, "", "cosine", "share of pairs, %")
    next(axes for axes in panels[1] if axes.axison).legend(fontsize=7)
    return figure


def pair_shares(runs: Sequence[RecordedRun]) -> tuple[list[float], list[float], list[float]]:
    """Bin edges, and the percentages of positive and negative pairs per bin, over all seeds.

    Raises:
        RunError: A run has no diagnostics.
    """
    counts: dict[str, list[float]] = {}
    edges: list[float] = []
    for run in runs:
        last = _records(run)[-1]["pair_similarity"]
        edges = last["edges"]
        for kind in ("positive", "negative"):
            before = counts.get(kind, [0.0] * len(last[kind]))
            counts[kind] = [a + b for a, b in zip(before, last[kind], strict=True)]
    return edges, _percent(counts["positive"]), _percent(counts["negative"])


def _percent(counts: Sequence[float]) -> list[float]:
    whole = math.fsum(counts)
    return [100 * count / whole if whole else 0.0 for count in counts]


# -- shared -----------------------------------------------------------------------------------------------------------
def _panels(lines: int, across: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * across, height * lines + 0.5), layout="constrained")
    grid = figure.subplots(lines, across, squeeze=False)
    return figure, [list(line) for line in grid]


def _band(axes: Axes, x: list[int], mean: list[float], spread: list[float], colour: str, title: str) -> None:
    marker = "o" if len(x) <= 20 else None
    axes.plot(x, mean, color=colour, label=title, linewidth=1.6, marker=marker, markersize=3)
    if any(spread):
        low = [m - s for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if x == "round":
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


_DRAW: Mapping[str, Callable[[FigureRuns], Figure]] = {
    "curves": _curves, "lines": _lines, "diagnostics": _diagnostics, "histograms": _histograms,
}  # fmt: skip
