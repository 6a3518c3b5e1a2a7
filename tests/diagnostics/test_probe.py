"""Selection of the probe's samples."""

from __future__ import annotations

import numpy as np
import torch

from fedfa.data import DataSet
from fedfa.diagnostics.probe import Probe, balanced_subset


def test_the_probe_is_balanced_over_classes_and_domains_and_takes_all_samples_of_small_ones() -> None:
    labels = np.array([0] * 50 + [1] * 50 + [2] * 3)
    counts = np.bincount(labels[balanced_subset(labels, None, 23, seed=1)], minlength=3)
    assert counts.tolist() == [10, 10, 3]
    domains = torch.tensor([0] * 40 + [1] * 63)
    chosen = balanced_subset(np.arange(103) % 2, domains, 20, seed=1)
    assert np.bincount(domains.numpy()[chosen] * 2 + chosen % 2).tolist() == [5, 5, 5, 5]


def test_the_probe_is_fixed_by_the_data_seed(blobs: DataSet) -> None:
    first, again, other = (Probe.of(blobs, 16, seed) for seed in (1, 1, 2))
    assert first.positions.tolist() == again.positions.tolist() == sorted(set(first.positions.tolist()))
    assert first.positions.tolist() != other.positions.tolist()
    assert torch.bincount(first.labels).tolist() == [4, 4, 4, 4]


def test_a_larger_probe_contains_the_smaller_one(blobs: DataSet) -> None:
    small, large = (set(Probe.of(blobs, size, 1).positions.tolist()) for size in (12, 30))
    assert small < large


def test_the_probe_has_normalised_test_samples(blobs: DataSet) -> None:
    probe = Probe.of(blobs, 10, 1)
    assert torch.equal(probe.inputs, blobs.normalisation.batch(blobs.test.inputs[probe.positions]))
    assert torch.equal(probe.labels, blobs.test.labels[probe.positions])
    assert probe.domains is None


def test_a_probe_larger_than_the_test_set_is_the_test_set(blobs: DataSet) -> None:
    assert Probe.of(blobs, 10_000, 1).positions.tolist() == list(range(len(blobs.test)))
