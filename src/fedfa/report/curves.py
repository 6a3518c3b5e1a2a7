"""Accuracy by round as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfa.errors import FedfaError


def accuracy_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str = "Accuracy of the global model"
) -> Path:
    """Draw the accuracy of several runs over their rounds.

    Args:
        runs: For each run by title, the records of its ``metrics.jsonl``.
        path: Where the picture goes; its ending chooses the format.
        title: Stands above the picture.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise FedfaError("pictures need matplotlib: pip install 'fedfa[plots]'") from None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, records in runs.items():
        points = [(r["round"], 100 * r["accuracy"]) for r in records if r["accuracy"] is not None]
        if not points:
            continue
        rounds, accuracies = zip(*points, strict=True)
        (line,) = axes.plot(rounds, accuracies, linewidth=2, marker="o" if len(points) < 40 else None, markersize=4)
        axes.annotate(
            f" {name} {accuracies[-1]:.1f} %", (rounds[-1], accuracies[-1]), color=line.get_color(), va="center",
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set(xlabel="round", ylabel="test accuracy, %", title=title, ylim=(0, 100))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.22)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
