"""The figure of the feature skew between domains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfa.data import DataSet, Normalisation
from fedfa.data.samples import Samples
from fedfa.errors import DataError
from fedfa.paper.data_figure import chosen_samples, draw_data_figure, pixel_densities


def domains_of_grey() -> DataSet:
    """Two domains of 6×6 pictures, four classes: one dark (values below 64), one bright (above 192)."""
    rng = np.random.default_rng(0)
    labels, domains = np.arange(120) % 4, (np.arange(120) // 60)
    pictures = rng.integers(0, 64, (120, 6, 6, 1)) + 192 * domains.reshape(-1, 1, 1, 1)
    samples = Samples(torch.from_numpy(pictures.astype(np.uint8)), torch.from_numpy(labels), torch.from_numpy(domains))
    return DataSet(
        name="grey", train=samples, test=samples, classes=tuple("abcd"), domains=("dark", "bright"),
        normalisation=Normalisation(), fingerprint="grey", manifest={},
    )  # fmt: skip


def test_samples_are_those_of_each_domain_and_all_classes() -> None:
    data = domains_of_grey()
    dark, bright = chosen_samples(data, 20, seed=1)
    assert len(dark) == len(bright) == 20
    assert dark.max() < 60 <= bright.min()
    assert torch.bincount(data.train.labels[dark]).tolist() == [5] * 4
    assert not torch.equal(chosen_samples(data, 20, seed=2)[0], dark)


def test_densities_integrate_to_one_and_show_the_skew() -> None:
    data = domains_of_grey()
    dark, bright = pixel_densities(data, chosen_samples(data, 20, seed=1), bins=4)
    assert dark == pytest.approx([4, 0, 0, 0])
    assert bright == pytest.approx([0, 0, 0, 4])


def test_the_figure_is_written_and_the_same_each_time(tmp_path: Path) -> None:
    paths = [tmp_path / "new" / "one.svg", tmp_path / "one.png"]
    draw_data_figure(domains_of_grey(), paths, samples=20)
    assert all(path.stat().st_size > 5000 for path in paths)
    before = paths[0].read_bytes()
    draw_data_figure(domains_of_grey(), paths[:1], samples=20)
    assert paths[0].read_bytes() == before


def test_other_data_are_refused(blobs: DataSet, tmp_path: Path) -> None:
    one_domain = replace(domains_of_grey(), domains=(), train=replace(domains_of_grey().train, domains=None))
    for data in (blobs, one_domain):
        with pytest.raises(DataError, match="images of several domains"):
            draw_data_figure(data, [tmp_path / "x.png"])
