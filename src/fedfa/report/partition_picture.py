"""Pictures of data: samples by client and class, and sheets of sample images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedfa.data.samples import DataSet, Samples
from fedfa.errors import DataError
from fedfa.report.html.drawing import matplotlib_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedfa.data.federation import Federation
    from fedfa.data.partitions.assignment import IntArray

_MAX_BUBBLES = 40
"""More clients are drawn as a heat map, because bubbles would overlap."""
_MAX_COLUMNS = 500
"""More clients are subsampled evenly: a column would be narrower than a pixel."""


def partition_picture(federation: Federation, path: Path, *, title: str = "", style: str = "auto") -> Path:
    """Draw clients × classes, with the number of samples of each client above; the file's suffix chooses the format.

    The style is ``"bubbles"``, ``"heat"``, or ``"auto"``: bubbles for up to 40 clients.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    if style not in ("auto", "bubbles", "heat"):
        raise DataError(f"unknown style {style!r}; choose bubbles, heat or auto")
    dataset, split = federation.dataset, federation.partition
    shown = evenly_spaced(len(split), _MAX_COLUMNS)
    counts = np.stack([federation.client(int(number)).label_counts.numpy() for number in shown])
    bubbles = style == "bubbles" or (style == "auto" and len(shown) <= _MAX_BUBBLES)
    height = 2.6 + 0.32 * min(dataset.num_classes, 20)
    figure = matplotlib_figure(figsize=(min(14, 4.5 + 0.22 * max(len(shown), 16)), height), layout="constrained")
    above, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3.6])
    _draw_sizes(above, counts.sum(axis=1))
    if bubbles:
        _draw_bubbles(main, counts, 72 * min(0.27, 0.85 * figure.get_figwidth() / len(shown)))
    else:
        from matplotlib.colors import PowerNorm

        # The square root separates small counts from none, which stays white.
        image = main.imshow(
            np.where(counts.T > 0, counts.T, np.nan),
            aspect="auto",
            cmap="viridis_r",
            interpolation="nearest",
            norm=PowerNorm(0.5, vmin=0, vmax=max(1, int(counts.max()))),
        )
        figure.colorbar(image, ax=main, label="samples", pad=0.01)
    _label_axes(main, dataset, len(shown))
    if len(shown) < len(split):
        main.set_xlabel(f"{len(shown)} of {len(split):,} clients, evenly spaced")
    _mark_domains(above, main, federation, shown)
    figure.suptitle(title or f"{dataset.name}, {len(split):,} clients", fontsize=11)
    return _save(figure, path)


def contact_sheet(dataset: DataSet, path: Path, *, columns: int = 20, rows: int = 3) -> Path:
    """Draw samples, classes from left to right; with domains, a band of rows for each domain."""
    if not dataset.train.is_image:
        raise DataError(f"{dataset.name} holds no images, so it has no contact sheet")
    bands = dataset.domains or (dataset.name,)
    margin, width, height = 1.3, columns * 0.45 + 1.4, len(bands) * (rows * 0.45 + 0.08)
    figure = matplotlib_figure(figsize=(width, height))
    figure.subplots_adjust(
        left=margin / width, right=1 - 0.1 / width, top=1 - 0.05 / height, bottom=0.05 / height, hspace=0.06
    )
    axes = np.atleast_1d(figure.subplots(len(bands), 1))
    for number, (band, ax) in enumerate(zip(bands, axes, strict=True)):
        chosen = _one_of_each(dataset.train, number if dataset.domains else None, columns, rows, dataset.num_classes)
        pixels = dataset.train.inputs.numpy()[chosen]
        _, high, wide, channels = pixels.shape
        sheet = np.full((rows * (high + 1), columns * (wide + 1), channels), 255, np.uint8)
        for position, picture in enumerate(pixels):
            top, left = position // columns * (high + 1), position % columns * (wide + 1)
            sheet[top : top + high, left : left + wide] = picture
        ax.imshow(sheet.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        ax.set_ylabel(band, rotation=0, ha="right", va="center", fontsize=11)
    return _save(figure, path)


def evenly_spaced(count: int, most: int) -> IntArray:
    """Indices of all of ``count`` items, or of ``most`` evenly spaced ones."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def client_domains(federation: Federation, clients: Iterable[int]) -> tuple[str, ...]:
    """Domain of each client, "" for a client without samples; empty if a client holds several, or there are none."""
    domains = federation.dataset.train.domains
    if domains is None:
        return ()
    held = [np.unique(domains.numpy()[federation.partition.client(int(client))]) for client in clients]
    if any(len(of) > 1 for of in held):
        return ()
    return tuple(federation.dataset.domains[int(of[0])] if len(of) else "" for of in held)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _draw_sizes(ax: Axes, sizes: IntArray) -> None:
    ax.bar(np.arange(len(sizes)), sizes, width=0.9 if len(sizes) < 200 else 1.0, color="#7f8fa6")
    ax.set_ylabel("samples")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="x", bottom=False, labelbottom=False)
    ax.set_ylim(0, max(1, int(sizes.max())) * 1.05)


def _draw_bubbles(ax: Axes, counts: IntArray, cell: float) -> None:
    """Draw circles whose area is proportional to the count; ``cell`` is the diameter of the largest, in points."""
    client, label = np.nonzero(counts)
    values = counts[client, label]
    area = cell**2 * values / values.max() if len(values) else values
    ax.scatter(client, label, s=np.maximum(area, 1.5), c=label, cmap="tab20" if counts.shape[1] > 10 else "tab10", lw=0)
    ax.set_ylim(counts.shape[1] - 0.4, -0.6)
    ax.grid(alpha=0.2, lw=0.6)
    ax.set_axisbelow(True)


def _label_axes(ax: Axes, dataset: DataSet, clients: int) -> None:
    step = 1 if dataset.num_classes <= 20 else dataset.num_classes // 10
    ticks = np.arange(0, dataset.num_classes, step)
    ax.set_yticks(ticks, [dataset.classes[tick] for tick in ticks])
    ax.set_xlim(-0.6, clients - 0.4)
    ax.set_xlabel("client")
    ax.spines[["top", "right"]].set_visible(False)


def _mark_domains(above: Axes, main: Axes, federation: Federation, shown: IntArray) -> None:
    """Separate and name the domains if every client holds one domain only."""
    held = client_domains(federation, shown)
    borders = [place for place in range(1, len(held)) if held[place] != held[place - 1]]
    for border in borders:
        for ax in (above, main):
            ax.axvline(border - 0.5, color="black", lw=0.8)
    for first, last in zip([0, *borders], [*borders, len(held)], strict=True):
        if held:
            at = ((first + last - 1) / 2, 1.04)
            above.text(*at, held[first], ha="center", va="bottom", transform=above.get_xaxis_transform())


def _one_of_each(data: Samples, domain: int | None, columns: int, rows: int, num_classes: int) -> IntArray:
    """Indices of the samples of a sheet: one class per column, classes from left to right."""
    labels = data.labels.numpy()
    inside = np.ones(len(labels), dtype=bool)
    if domain is not None and data.domains is not None:
        inside = data.domains.numpy() == domain
    chosen = np.empty((rows, columns), dtype=np.int64)
    taken = np.zeros(num_classes, dtype=np.int64)
    for column in range(columns):
        label = column * num_classes // columns
        members = np.flatnonzero(inside & (labels == label))
        if not len(members):
            members = np.flatnonzero(inside)
        chosen[:, column] = members[(taken[label] + np.arange(rows)) % len(members)]
        taken[label] += rows
    return chosen.ravel()
