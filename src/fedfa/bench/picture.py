"""The records as one picture."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedfa.bench.figures import Figure, ratio, round_seconds
from fedfa.bench.tables import by_round, good, step_shares
from fedfa.errors import FedfaError

OURS, OTHERS, BARE, WORK = "#0b6e4f", "#8a8f98", "#c9ccd1", "#2f5d8a"


def check_drawing() -> None:
    """Whether a picture can be drawn, asked before an hour of measuring.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise FedfaError("pictures need matplotlib: pip install 'fedfa[plots]'")


def draw(records: dict[str, dict[str, Any]], path: Path) -> Path:
    """Draw what was measured: speeds as bars, growth as lines, the step as shares.

    Args:
        records: By section; those that are missing leave their place empty.
        path: Where the picture goes; its ending chooses the format.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    check_drawing()
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    panels: dict[str, Callable[[Any, dict[str, Any]], None]] = {
        "cnn": _bars, "mlp": _bars, "clients": _growth, "cohort": _growth, "step": _shares,
    }  # fmt: skip
    drawn = [name for name in panels if name in records and any(map(good, records[name]["contenders"]))]
    # What grows stands side by side; everything else has long names and takes a row.
    rows = [[name] for name in drawn if panels[name] is not _growth]
    if growing := [name for name in drawn if panels[name] is _growth]:
        rows.append(growing)
    # Text stays text, and the same measurements give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedfa", "font.size": 9}):
        heights = [max(3.2, 0.8 + 0.3 * _bars_of(records[names[0]])) for names in rows] or [3.2]
        canvas = Canvas(figsize=(8.6, sum(heights)), layout="constrained")
        strips = canvas.subfigures(len(heights), 1, squeeze=False, hspace=0.06, height_ratios=heights)[:, 0]
        for strip, names in zip(strips, rows, strict=False):
            for axes, name in zip(strip.subplots(1, len(names), squeeze=False)[0], names, strict=True):
                panels[name](axes, records[name])
                axes.spines[["top", "right"]].set_visible(False)
                axes.set_title(records[name]["title"], loc="left", fontsize=10, fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _bars_of(record: dict[str, Any]) -> int:
    """How many bars a section has, each of which may need two lines of text."""
    return len(step_shares(record)) // 2 if record["section"] == "step" else len(record["contenders"])


def _label(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center")


def _bars(axes: Any, record: dict[str, Any]) -> None:
    reference = record["contenders"][0]["measurements"]
    rows = []
    for contender in record["contenders"]:
        figure = ratio(contender["measurements"], reference, by_round=by_round(record))
        if figure is not None:
            rows.append((contender["title"], figure, "fedfa" in contender["title"], "loop" in contender["title"]))
    rows.reverse()
    middles = [figure.middle for _, figure, _, _ in rows]
    spread = [
        [figure.middle - figure.low for _, figure, _, _ in rows],
        [figure.high - figure.middle for _, figure, _, _ in rows],
    ]
    colours = [OURS if ours else BARE if bare else OTHERS for _, _, ours, bare in rows]
    titles = ["\n".join(textwrap.wrap(title, 44)) for title, *_ in rows]
    axes.barh(titles, middles, color=colours, xerr=spread, error_kw={"lw": 1, "capsize": 2})
    for place, figure in enumerate(figure for _, figure, _, _ in rows):
        _label(axes, f"{figure.middle:.2f}", figure.high, place)
    axes.margins(x=0.14)
    axes.set_xlabel("speed against the plain loop")


def _growth(axes: Any, record: dict[str, Any]) -> None:
    key = "clients" if record["section"] == "clients" else "cohort"
    points = [(good(c)[0][key], good(c)) for c in record["contenders"] if good(c)]
    where = [place for place, _ in points]
    seconds = [Figure.of([1000 * round_seconds(one) for one in done]) for _, done in points]
    memory = [Figure.of([one["resident_mb"] for one in done]) for _, done in points]
    spread = [[f.middle - f.low for f in seconds], [f.high - f.middle for f in seconds]]
    axes.errorbar(where, [f.middle for f in seconds], yerr=spread, color=OURS, marker="o", lw=2, capsize=2)
    axes.set_xscale("log")
    axes.set(xlabel="clients" if key == "clients" else "clients a round", ylabel="ms a round")
    axes.yaxis.label.set_color(OURS)
    if key == "cohort":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0, top=1.5 * max(f.high for f in seconds))
    other = axes.twinx()
    other.plot(where, [f.middle for f in memory], color=WORK, marker="s", lw=1.5, ls="--")
    other.set_ylabel("memory without data, MB", color=WORK)
    other.set_ylim(bottom=0, top=1.5 * max(f.middle for f in memory))
    other.spines["top"].set_visible(False)


def _shares(axes: Any, record: dict[str, Any]) -> None:
    shares = list(step_shares(record).items())[::-1]
    # Hooks of a method are named "part: hook".
    colours = [OURS if ": " in name and not name.startswith("batch") else OTHERS for name, _ in shares]
    axes.barh([name for name, _ in shares], [100 * share for _, share in shares], color=colours)
    for place, (_, share) in enumerate(shares):
        _label(axes, f"{100 * share:.1f}", 100 * share, place)
    axes.margins(x=0.12)
    axes.set_xlabel("% of a step (green: what FedFA adds)")
