"""The paper's figure of Mixed Digits: examples of each domain, and how the domains' features differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfa.data.samples import DataSet
from fedfa.diagnostics.embedding import embed
from fedfa.diagnostics.probe import balanced_order
from fedfa.errors import DataError, FedfaError
from fedfa.paper.figures import COLOURS, MARKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DATA_FIGURES: Mapping[str, str] = {
    "mixed-digits": "Mixed Digits: examples, and the skew of features between its domains"
}
"""Figures of data, which need no run, by the name of the data set."""
SAMPLES = 100
"""Samples of each domain, as in the paper."""


def draw_data_figure(dataset: DataSet, paths: Sequence[Path], samples: int = SAMPLES, seed: int = 1) -> None:
    """Draw (a) examples, (b) the distribution of pixel values, (c) a t-SNE of the pictures, by domain.

    Args:
        dataset: Images of several domains.
        paths: Files to write; their suffixes choose the formats.
        samples: Random samples of each domain, over all classes, for (b) and (c).
        seed: Of their choice and of the t-SNE.

    Raises:
        DataError: The data are no images of several domains.
        FedfaError: matplotlib or scikit-learn is not installed.
    """
    data = dataset.train
    if not data.is_image or data.domains is None:
        raise DataError(f"{dataset.name} does not hold images of several domains")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise FedfaError("figures need matplotlib: pip install 'fedfa[plots]'") from None
    chosen = chosen_samples(dataset, samples, seed)
    with mpl.rc_context({"svg.hashsalt": "fedfa", "font.size": 9}):
        figure = Figure(figsize=(12.5, 3.6), layout="constrained")
        examples, pixels, plane = figure.subplots(1, 3, width_ratios=[1.35, 1, 1])
        _examples(examples, dataset, chosen)
        _pixel_values(pixels, dataset, chosen)
        _plane(plane, dataset, chosen, seed)
        figure.suptitle(f"{dataset.name}: {samples} random training samples of each domain", fontsize=10)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            extra: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=150, **extra)


def chosen_samples(dataset: DataSet, samples: int, seed: int) -> list[Tensor]:
    """Positions of samples of each domain, drawn evenly over the classes."""
    domains = dataset.train.domains
    assert domains is not None
    order = torch.from_numpy(balanced_order(dataset.train.labels.numpy(), domains.numpy(), seed))
    return [order[domains[order] == number][:samples] for number in range(len(dataset.domains))]


def _examples(axes: Axes, dataset: DataSet, chosen: Sequence[Tensor]) -> None:
    """A row of pictures per domain, one of each class."""
    labels, inputs = dataset.train.labels, dataset.train.inputs
    _, high, wide, channels = inputs.shape
    sheet = np.full((len(chosen) * (high + 2), dataset.num_classes * (wide + 2), channels), 255, np.uint8)
    for row, positions in enumerate(chosen):
        for label in range(dataset.num_classes):
            found = positions[labels[positions] == label]
            if len(found):
                top, left = row * (high + 2), label * (wide + 2)
                sheet[top : top + high, left : left + wide] = inputs[found[0]].numpy()
    axes.imshow(sheet.squeeze(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([(wide + 2) * (label + 0.5) for label in range(dataset.num_classes)], dataset.classes)
    axes.set_yticks([(high + 2) * (row + 0.5) for row in range(len(chosen))], dataset.domains)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("(a) examples")


def pixel_densities(dataset: DataSet, chosen: Sequence[Tensor], bins: int = 32) -> list[np.ndarray]:
    """For each domain the density of pixel values in [0, 1], ``[bins]``; each integrates to one."""
    inputs = dataset.train.inputs
    return [
        np.histogram(inputs[positions].numpy() / 255, bins=bins, range=(0, 1), density=True)[0] for positions in chosen
    ]


def _pixel_values(axes: Axes, dataset: DataSet, chosen: Sequence[Tensor]) -> None:
    densities = pixel_densities(dataset, chosen)
    middles = (np.arange(len(densities[0])) + 0.5) / len(densities[0])
    for number, density in enumerate(densities):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(middles, np.maximum(density, 1e-3), color=colour, label=dataset.domains[number])
    axes.set_yscale("log")  # the black ground of handwritten digits would hide everything else
    axes.set_xlabel("pixel value")
    axes.set_ylabel("density")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("(b) distribution of pixel values")


def _plane(axes: Axes, dataset: DataSet, chosen: Sequence[Tensor], seed: int) -> None:
    positions = torch.cat(list(chosen))
    pictures = dataset.train.inputs[positions].flatten(1).float() / 255
    domains = dataset.train.domains
    assert domains is not None
    stored = {
        "features": pictures.unsqueeze(0), "labels": dataset.train.labels[positions], "domains": domains[positions],
        "own": torch.ones(1, len(positions)), "clients": torch.zeros(1, dtype=torch.int64),
    }  # fmt: skip
    embedded = embed(stored, len(positions), seed)
    for number, name in enumerate(dataset.domains):
        xy = embedded["xy"][embedded["domain"] == number].numpy()
        axes.scatter(
            xy[:, 0], xy[:, 1], s=10, marker=MARKS[number % len(MARKS)], color=COLOURS[number % len(COLOURS)],
            label=name, linewidths=0,
        )  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title("(c) t-SNE of the pictures")
