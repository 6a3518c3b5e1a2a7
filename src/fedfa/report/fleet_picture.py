"""A picture of a fleet: how fast its devices and links are, and when they are available."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedfa.fleet.availability import DAY, Floats
from fedfa.fleet.devices import Fleet
from fedfa.report.html.drawing import matplotlib_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SAMPLED = 20_000
"""Devices of a larger fleet that the curve of availability is taken from, evenly spaced."""


def fleet_picture(fleet: Fleet, path: Path, *, title: str = "") -> Path:
    """Draw the distributions of speeds and links, and the share of available devices over two days.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    figure = matplotlib_figure(figsize=(11, 5.6), layout="constrained")
    above, below = figure.subfigures(2, 1)
    panels = above.subplots(1, 3)
    _draw_distribution(panels[0], fleet.speed, "computing speed [samples/s]", "#40739e")
    _draw_distribution(panels[1], fleet.down / 1e6, "download [MB/s]", "#44bd32")
    _draw_distribution(panels[2], fleet.up / 1e6, "upload [MB/s]", "#e1b12c")
    panels[0].set_ylabel("devices")
    _draw_availability(below.subplots(), fleet)
    figure.suptitle(title or f"{len(fleet):,} devices", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def availability_curve(fleet: Fleet, hours: Floats) -> Floats:
    """Share of the devices that are available at each hour."""
    if fleet.availability is None:
        return np.ones(len(hours))
    clients = np.unique(np.linspace(0, len(fleet) - 1, min(len(fleet), _SAMPLED)).astype(np.int64))
    return np.asarray([fleet.availability.available(clients, float(hour) * 3600).mean() for hour in hours])


def _draw_distribution(ax: Axes, values: Floats, label: str, colour: str) -> None:
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low * 0.9, high * 1.1, 30) if high > low else np.asarray([low * 0.8, low * 1.25])
    ax.hist(values, edges.tolist(), color=colour)
    ax.axvline(float(np.median(values)), color="black", lw=1, ls="--", label=f"median {np.median(values):.3g}")
    ax.set_xscale("log")
    ax.set_xlabel(label)
    ax.legend(frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_availability(ax: Axes, fleet: Fleet) -> None:
    hours = np.linspace(0, 2 * DAY / 3600, 193)
    ax.plot(hours, 100 * availability_curve(fleet, hours), color="#c23616")
    ax.set_xlabel("virtual time [h]")
    ax.set_ylabel("available devices [%]")
    ax.set_ylim(0, 105)
    ax.set_xlim(0, hours[-1])
    ax.set_xticks(np.arange(0, 49, 6))
    ax.grid(alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)
