"""Draw the records as one figure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.bench.medians import Summary, round_seconds
from benchmarks.bench.tables import Record, relative_time, step_shares, successful
from fedfa.errors import FedfaError

FEDFA, OTHERS, LOOP, MEMORY = "#0b6e4f", "#8a8f98", "#c9ccd1", "#2f5d8a"


def check_matplotlib() -> None:
    """Fail before an hour of measuring if no figure can be drawn.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise FedfaError("figures need matplotlib: pip install 'fedfa[plots]'")


def draw(records: dict[str, Record], path: Path) -> None:
    """Draw speeds as bars, scaling as lines, the shares of a step as bars.

    Args:
        records: By section; sections without a record are left out.
        path: Output file; its suffix selects the format.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    panels: dict[str, Callable[[Any, Record], None]] = {
        "cnn": _speeds, "mlp": _speeds, "clients": _scaling, "cohort": _scaling, "step": _shares,
    }  # fmt: skip
    drawn = [name for name in panels if name in records and any(map(successful, records[name]["contenders"]))]
    # Scaling panels share a row; the others have long labels and take a row each.
    rows = [[name] for name in drawn if panels[name] is not _scaling]
    if scaling := [name for name in drawn if panels[name] is _scaling]:
        rows.append(scaling)
    # Text stays text, and the same records give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedfa", "font.size": 9}):
        heights = [max(3.2, 0.8 + 0.3 * _bar_count(records[names[0]])) for names in rows] or [3.2]
        figure = Figure(figsize=(8.6, sum(heights)), layout="constrained")
        strips = figure.subfigures(len(heights), 1, squeeze=False, hspace=0.06, height_ratios=heights)[:, 0]
        for strip, names in zip(strips, rows, strict=False):
            for axes, name in zip(strip.subplots(1, len(names), squeeze=False)[0], names, strict=True):
                panels[name](axes, records[name])
                axes.spines[["top", "right"]].set_visible(False)
                axes.set_title(records[name]["title"], loc="left", fontsize=10, fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bar_count(record: Record) -> int:
    """Bars of a section, each of which may need two lines of text."""
    return len(step_shares(record)) // 2 if record["section"] == "step" else len(record["contenders"])


def _error_bars(summaries: Sequence[Summary]) -> list[list[float]]:
    return [[s.median - s.low for s in summaries], [s.high - s.median for s in summaries]]


def _label(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center")


def _speeds(axes: Any, record: Record) -> None:
    reference = record["contenders"][0]
    measured = [(c["title"], relative_time(record, reference, c)) for c in reversed(record["contenders"])]
    speeds = {title: speed for title, speed in measured if speed is not None}
    colours = [FEDFA if "fedfa" in title else LOOP if "loop" in title else OTHERS for title in speeds]
    labels = ["\n".join(textwrap.wrap(title, 44)) for title in speeds]
    summaries = list(speeds.values())
    error_bars = {"xerr": _error_bars(summaries), "error_kw": {"lw": 1, "capsize": 2}}
    axes.barh(labels, [speed.median for speed in summaries], color=colours, **error_bars)
    for place, speed in enumerate(summaries):
        _label(axes, f"{speed.median:.2f}", speed.high, place)
    axes.margins(x=0.14)
    axes.set_xlabel("speed relative to the plain loop")


def _scaling(axes: Any, record: Record) -> None:
    key = record["section"]
    points = [done for done in map(successful, record["contenders"]) if done]
    sizes = [done[0]["clients" if key == "clients" else "cohort"] for done in points]
    times = [Summary.of([1000 * round_seconds(one) for one in done]) for done in points]
    memory = [Summary.of([one["resident_mb"] for one in done]).median for done in points]
    medians = [time.median for time in times]
    axes.errorbar(sizes, medians, yerr=_error_bars(times), color=FEDFA, marker="o", lw=2, capsize=2)
    axes.set_xscale("log")
    axes.set(xlabel="clients" if key == "clients" else "clients per round", ylabel="ms per round")
    axes.yaxis.label.set_color(FEDFA)
    if key == "cohort":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0, top=1.5 * max(time.high for time in times))
    other = axes.twinx()
    other.plot(sizes, memory, color=MEMORY, marker="s", lw=1.5, ls="--")
    other.set_ylabel("memory without data, MB", color=MEMORY)
    other.set_ylim(bottom=0, top=1.5 * max(memory))
    other.spines["top"].set_visible(False)


def _shares(axes: Any, record: Record) -> None:
    shares = {name: 100 * share for name, share in reversed(step_shares(record).items())}
    # Hooks of a method are named "component: hook".
    colours = [FEDFA if ": " in name and not name.startswith("batch") else OTHERS for name in shares]
    axes.barh(list(shares), list(shares.values()), color=colours)
    for place, share in enumerate(shares.values()):
        _label(axes, f"{share:.1f}", share, place)
    axes.margins(x=0.12)
    axes.set_xlabel("% of a step (green: added by FedFA)")
