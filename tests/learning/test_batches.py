"""Batches are in order and complete, however many are fetched at once; class counts are right in each of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fedfa.learning import batches
from fedfa.learning.batches import Fetched, Fetching, Labels
from fedfa.learning.context import LocalTraining
from fedfa.stacking import trainer
from fedfa.stacking.client_axis import StackedSamples

CPU = torch.device("cpu")


class Rows:
    """Sample k has input (first + k, first + k) and label k mod 3; remembers how many were asked for at a time."""

    def __init__(self, first: int = 0, size: int = 0) -> None:
        self.first, self.size = first, size
        self.asked: list[int] = []

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(len(positions))
        return (self.first + positions).float().unsqueeze(1).repeat(1, 2), positions % 3


@given(samples=st.integers(0, 40), size=st.integers(1, 12), limit=st.integers(0, 12), room=st.integers(1, 300))
def test_batches_are_those_of_the_order_however_many_are_fetched_at_once(
    samples: int, size: int, limit: int, room: int
) -> None:
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(samples))
    expected = torch.split(order, size)[: min(limit, -(-samples // size))] if samples else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "FETCHED", room)
        fetching = Fetching(Rows(), size, 3, CPU)
        for _ in range(2):  # the second epoch begins with as many as the first one found to fit
            found = list(fetching.batches(order, len(expected)))
            assert [piece.positions.tolist() for piece in found] == [index.tolist() for index in expected]
            assert all(torch.equal(piece.x[:, 0].long(), piece.positions) for piece in found)
            assert all(torch.equal(piece.y, piece.positions % 3) for piece in found)


def test_after_the_first_batch_as_many_are_fetched_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples of two float32 are 32 bytes; there is room for 100, so three batches."""
    monkeypatch.setattr(batches, "FETCHED", 100)
    rows = Rows()
    fetching = Fetching(rows, 4, 3, CPU)
    list(fetching.batches(torch.arange(30), 8))
    assert rows.asked == [4, 12, 12, 2]
    list(fetching.batches(torch.arange(30), 5))
    assert rows.asked[4:] == [12, 8]


def test_a_batch_larger_than_the_room_is_fetched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FETCHED", 1)
    rows = Rows()
    list(Fetching(rows, 4, 3, CPU).batches(torch.arange(10), 3))
    assert rows.asked == [4, 4, 2]


def test_class_counts_are_those_of_each_batch() -> None:
    """Batches (0, 0, 1), (1, 1, 1) and (2)."""
    labels = Labels(torch.tensor([0, 0, 1, 1, 1, 1, 2]), 3, 3)
    found = [labels.class_counts(number, torch.float64).flatten().tolist() for number in range(3)]
    assert found == [[2.0, 2.0, 1.0], [3.0, 3.0, 3.0], [1.0]]
    assert labels.class_counts(0, torch.float32).shape == (3, 1)
    assert labels.class_counts(0, torch.float32).dtype == torch.float32


@given(
    y=st.integers(1, 4).flatmap(
        lambda clients: st.integers(1, 9).flatmap(
            lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=clients, max_size=clients)
        )
    ),
    size=st.integers(1, 5),
)
def test_stacked_clients_have_the_class_counts_they_have_alone(y: list[list[int]], size: int) -> None:
    together = Labels(torch.tensor(y), size, 5)
    for number in range(-(-len(y[0]) // size)):
        stacked = together.class_counts(number, torch.float32)
        for client, own in enumerate(y):
            alone = Labels(torch.tensor(own), size, 5).class_counts(number, torch.float32)
            assert torch.equal(stacked[client], alone)
            counted = [own[number * size : (number + 1) * size].count(label) for label in own[number * size :][:size]]
            assert alone.flatten().tolist() == counted


@given(samples=st.integers(1, 9), size=st.integers(1, 5), clients=st.integers(1, 3), room=st.integers(1, 400))
def test_epochs_of_stacked_clients_are_those_of_each_alone(samples: int, size: int, clients: int, room: int) -> None:
    """However many epochs are arranged at once; the third one is cut short."""
    each = [Rows(first=100 * client, size=samples) for client in range(clients)]
    whole = -(-samples // size)
    counts = [whole, whole, 1]
    local = LocalTraining(batch_size=size, steps=sum(counts))
    ctx: Any = SimpleNamespace(size=samples, local=local, batches_per_epoch=whole, num_classes=3, device=CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "FETCHED", room)
        together = trainer._epochs(StackedSamples(each), _streams(clients), ctx)
        found = [[(piece.x, piece.y, piece.positions, _of_labels(piece)) for piece in epoch] for epoch in together]
    assert [len(epoch) for epoch in found] == counts
    for client, stream in enumerate(_streams(clients)):
        alone = Fetching(each[client], size, 3, CPU).epochs(stream, samples, counts)
        for epoch, own_epoch in zip(found, alone, strict=True):
            for (*stacked, of_labels), own in zip(epoch, own_epoch, strict=True):
                for one, other in zip(stacked, (own.x, own.y, own.positions), strict=True):
                    assert torch.equal(one[client], other)
                assert all(
                    torch.equal(one[client], other) for one, other in zip(of_labels, _of_labels(own), strict=True)
                )


def _streams(clients: int) -> list[np.random.Generator]:
    return [np.random.default_rng(client) for client in range(clients)]


def _of_labels(piece: Fetched) -> tuple[Tensor, Tensor]:
    labels, number = piece.place
    return labels.class_counts(number, torch.float32), labels.targets(number, torch.float32)


def test_targets_are_the_gradient_of_the_mean_cross_entropy_at_the_log_softmax() -> None:
    """Batches (2, 0) and (1): minus one half where the classes of the first are, minus one in the second."""
    labels = Labels(torch.tensor([2, 0, 1]), 2, 3)
    assert labels.targets(0, torch.float64).tolist() == [[0, 0, -0.5], [-0.5, 0, 0]]
    assert labels.targets(1, torch.float64).tolist() == [[0, -1, 0]]
    scores = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    functional.nll_loss(scores, torch.tensor([2, 0])).backward()  # torch leaves it so
    assert torch.equal(labels.targets(0, torch.float64), _gradient(scores))


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
