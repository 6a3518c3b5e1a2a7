"""Dirichlet and shards against flwr-datasets, an independent implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data import Dirichlet, Samples, Shards, partition

partitioner = pytest.importorskip(
    "flwr_datasets.partitioner", reason="flwr-datasets is not installed (development only)"
)
datasets = pytest.importorskip("datasets", reason="datasets is not installed (development only)")
stats = pytest.importorskip("scipy.stats")

pytestmark = pytest.mark.slow  # the oracle splits a few times a second
CLASSES, CLIENTS, DRAWS = 5, 8, 60
LABELS = np.random.default_rng(3).permutation(np.repeat(np.arange(CLASSES), 400))


Statistic = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def agree(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any], statistics: list[Statistic]) -> None:
    for statistic in statistics:
        assert stats.ks_2samp(statistic(mine), statistic(other)).pvalue > 1e-3


def ours(spec: Dirichlet | Shards, seed: int) -> np.ndarray[Any, Any]:
    data = Samples(torch.zeros(len(LABELS), 1), torch.from_numpy(LABELS))
    return partition(data, spec, CLIENTS, CLASSES, seed).label_counts(LABELS, CLASSES)


def theirs(made: Any) -> np.ndarray[Any, Any]:
    made.dataset = datasets.Dataset.from_dict({"label": LABELS.tolist()})
    return np.stack([np.bincount(made.load_partition(client)["label"], minlength=CLASSES) for client in range(CLIENTS)])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_dirichlet_agrees_in_distribution(alpha: float) -> None:
    mine = np.stack([ours(Dirichlet(alpha=alpha, min_size=0), seed) for seed in range(DRAWS)])
    other = np.stack(
        [
            theirs(
                partitioner.DirichletPartitioner(
                    num_partitions=CLIENTS,
                    partition_by="label",
                    alpha=alpha,
                    min_partition_size=0,
                    self_balancing=False,
                    seed=seed,
                )
            )
            for seed in range(DRAWS)
        ]
    )
    checks: list[Statistic] = [
        lambda counts: counts[:, :, 0].max(axis=1),  # largest share of a class, independent over draws
        lambda counts: counts.sum(axis=2).max(axis=1),  # size of the largest client
        lambda counts: counts.sum(axis=2).min(axis=1),
        lambda counts: (counts[:, 0] > 4).sum(axis=1),  # classes that one client holds more than a trace of
    ]
    agree(mine, other, checks)


@pytest.mark.parametrize("per_client", [1, 2, 5])
def test_shards_agree_in_distribution(per_client: int) -> None:
    mine = np.stack([ours(Shards(classes_per_client=per_client), seed) for seed in range(DRAWS)])
    other = np.stack(
        [
            theirs(
                partitioner.ShardPartitioner(
                    num_partitions=CLIENTS, partition_by="label", num_shards_per_partition=per_client, seed=seed
                )
            )
            for seed in range(DRAWS)
        ]
    )
    assert np.array_equal(np.unique(mine.sum(axis=2)), np.unique(other.sum(axis=2)))  # equal sizes, the same ones
    assert np.array_equal(mine.sum(axis=1), other.sum(axis=1))  # both exhaustive
    checks: list[Statistic] = [
        lambda counts: (counts > 0).sum(axis=2).mean(axis=1),  # classes per client
        lambda counts: (counts[:, 0] > 0).sum(axis=1),
        lambda counts: counts.max(axis=2).mean(axis=1),
    ]
    agree(mine, other, checks)
