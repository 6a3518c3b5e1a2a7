"""Batches come in order and whole, however many are fetched at once; weights of classes are right in each of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfa.learning import batches
from fedfa.learning.batches import Fetching, Labels

CPU = torch.device("cpu")


class Rows:
    """Sample k has input (k, k) and label k mod 3; remembers how many were asked for at a time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(len(positions))
        return positions.float().unsqueeze(1).repeat(1, 2), positions % 3


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


def test_the_samples_of_each_class_of_a_batch_share_its_weight() -> None:
    """Batches (0, 0, 1), (1, 1, 1) and (2): each class of a batch weighs 6."""
    labels = Labels(torch.tensor([0, 0, 1, 1, 1, 1, 2]), 3, 3)
    found = [labels.class_weights(number, 6.0, torch.float64).flatten().tolist() for number in range(3)]
    assert found == [[3.0, 3.0, 6.0], [2.0, 2.0, 2.0], [6.0]]
    assert labels.class_weights(0, 1.0, torch.float32).shape == (3, 1)
    assert labels.class_weights(0, 1.0, torch.float32).dtype == torch.float32


@given(
    y=st.integers(1, 4).flatmap(
        lambda clients: st.integers(1, 9).flatmap(
            lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=clients, max_size=clients)
        )
    ),
    size=st.integers(1, 5),
)
def test_clients_side_by_side_have_the_weights_they_have_alone(y: list[list[int]], size: int) -> None:
    together = Labels(torch.tensor(y), size, 5)
    for number in range(-(-len(y[0]) // size)):
        stacked = together.class_weights(number, 0.3, torch.float32)
        for client, own in enumerate(y):
            alone = Labels(torch.tensor(own), size, 5).class_weights(number, 0.3, torch.float32)
            assert torch.equal(stacked[client], alone)
            counted = [own[number * size : (number + 1) * size].count(label) for label in own[number * size :][:size]]
            assert alone.flatten().tolist() == pytest.approx([0.3 / count for count in counted])
