from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfa.learning.aggregate import (
    Aggregate,
    Contribution,
    WeightedSum,
    contribution_nbytes,
    flatten_contribution,
    unflatten_contribution,
)
from fedfa.learning.tensors import first_non_finite, flatten, nbytes, unflatten

VALUES = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3)
WEIGHTS = st.integers(1, 10_000)
CLIENTS = st.lists(st.tuples(VALUES, WEIGHTS), min_size=1, max_size=12)


def contribution(values: Sequence[float], weight: float) -> Contribution:
    return {"fedavg/model": WeightedSum.of({"w": torch.tensor(values)}, weight)}


def total_of(contributions: Sequence[Contribution]) -> Aggregate:
    total = Aggregate()
    for one in contributions:
        total.add(one)
    return total


@given(CLIENTS, st.data())
def test_total_does_not_depend_on_the_grouping(clients: list[tuple[list[float], int]], data: st.DataObject) -> None:
    """Workers may add up their share first: the result differs at most in the last places of a double."""
    contributions = [contribution(values, weight) for values, weight in clients]
    cut = data.draw(st.integers(0, len(contributions)))
    order = data.draw(st.permutations(range(len(contributions))))
    in_one_go = total_of(contributions)
    groups = [total_of([contributions[i] for i in group]) for group in (order[:cut], order[cut:]) if group]
    in_groups = total_of([{"fedavg/model": group["fedavg/model"]} for group in groups])
    scale = sum(float(s["fedavg/model"].tensors["w"].abs().max()) for s in contributions)
    for a, b in zip(in_one_go["fedavg/model"].tensors["w"], in_groups["fedavg/model"].tensors["w"], strict=True):
        assert abs(float(a - b)) <= 1e-15 * len(contributions) * scale
    assert in_one_go["fedavg/model"].weight == in_groups["fedavg/model"].weight == sum(w for _, w in clients)


@given(CLIENTS)
def test_mean_is_the_weighted_mean(clients: list[tuple[list[float], int]]) -> None:
    mean = total_of([contribution(values, weight) for values, weight in clients]).mean("fedavg/model")["w"]
    weights = torch.tensor([float(w) for _, w in clients], dtype=torch.float64)
    values = torch.tensor([v for v, _ in clients], dtype=torch.float64)
    expected = (weights.unsqueeze(1) * values).sum(0) / weights.sum()
    assert mean.dtype == torch.float64
    assert torch.allclose(mean, expected, rtol=1e-6, atol=1e-6 * float(values.abs().max()))


def test_mean_by_hand() -> None:
    total = total_of([contribution([1.0, 2.0, 3.0], 1), contribution([5.0, 6.0, 7.0], 3)])
    assert total.clients == 2
    assert total.mean("fedavg/model")["w"].tolist() == [4.0, 5.0, 6.0]


def test_rows_nobody_spoke_for_are_zero() -> None:
    counts = torch.tensor([[2.0], [0.0]])
    total = Aggregate()
    total.add({"g": WeightedSum.of({"rows": torch.tensor([[1.0, 1.0], [9.0, 9.0]])}, counts)})
    total.add({"g": WeightedSum.of({"rows": torch.tensor([[4.0, 7.0], [9.0, 9.0]])}, torch.tensor([[1.0], [0.0]]))})
    assert total.mean("g")["rows"].tolist() == [[2.0, 3.0], [0.0, 0.0]]
    assert total["g"].weight.tolist() == [[3.0], [0.0]]


def test_counters_of_whole_numbers_are_averaged_exactly() -> None:
    """BatchNorm's num_batches_tracked; too large for a float32, exact in a double."""
    big = 2**24 + 1
    total = Aggregate()
    for value, weight in ((big, 1), (big + 2, 1)):
        total.add({"g": WeightedSum.of({"n": torch.tensor(value)}, weight)})
    assert total.mean("g")["n"].item() == big + 1


def test_membership() -> None:
    total = total_of([contribution([1.0, 1.0, 1.0], 1)])
    assert "fedavg/model" in total
    assert "fedavg/other" not in total


def test_each_is_kept_only_if_asked_for() -> None:
    together = Aggregate(keep_each=True)
    for one in (contribution([1.0, 2.0, 3.0], 1), contribution([5.0, 6.0, 7.0], 3)):
        together.add(one)
    assert [each["fedavg/model"].tensors["w"].tolist() for each in together.each] == [[1, 2, 3], [15, 18, 21]]
    assert total_of([contribution([1.0, 2.0, 3.0], 1)]).each == []


def test_adding_does_not_change_what_was_added() -> None:
    first = {"g": WeightedSum.of({"n": torch.tensor([1])}, 1)}
    total = Aggregate(keep_each=True)
    total.add(first)
    total.add({"g": WeightedSum.of({"n": torch.tensor([2])}, 1)})
    assert first["g"].tensors["n"].tolist() == [1.0]
    assert [each["g"].tensors["n"].item() for each in total.each] == [1.0, 2.0]


NAMES = st.text("abcdefgh._0123456789", min_size=1, max_size=8)
TENSORS = st.dictionaries(NAMES, VALUES.map(torch.tensor), max_size=3)


@given(st.dictionaries(st.builds("{}/{}".format, NAMES, NAMES), st.tuples(TENSORS, WEIGHTS), max_size=4))
def test_flat_sums_come_back(groups: dict[str, tuple[dict[str, torch.Tensor], int]]) -> None:
    contribution: Contribution = {group: WeightedSum.of(values, weight) for group, (values, weight) in groups.items()}
    back = unflatten_contribution(flatten_contribution(contribution))
    assert back.keys() == contribution.keys()
    for group, entry in contribution.items():
        assert torch.equal(back[group].weight, entry.weight)
        assert back[group].tensors.keys() == entry.tensors.keys()
        assert all(torch.equal(back[group].tensors[name], value) for name, value in entry.tensors.items())
    assert contribution_nbytes(contribution) == nbytes(flatten_contribution(contribution))


def test_flat_sums_have_readable_names() -> None:
    both = {"anchors/anchors": WeightedSum.of({"anchors": torch.ones(2)}, 1), **contribution([1, 2, 3], 1)}
    assert set(flatten_contribution(both)) == {
        "anchors/anchors#weight", "anchors/anchors:anchors", "fedavg/model#weight", "fedavg/model:w",
    }  # fmt: skip


def test_flat_sums_with_an_odd_tensor_name_come_back() -> None:
    contribution = {"a/b": WeightedSum.of({"x#weight": torch.ones(2)}, 1)}
    assert unflatten_contribution(flatten_contribution(contribution))["a/b"].tensors.keys() == {"x#weight"}


def test_bytes_are_counted_with_the_weight() -> None:
    assert contribution_nbytes(contribution([1.0, 2.0, 3.0], 1)) == 3 * 4 + 4
    assert nbytes({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.int64)}) == 24 + 40


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES.map(torch.tensor), min_size=1, max_size=3), max_size=3))
def test_flat_tensors_come_back(nested: dict[str, dict[str, torch.Tensor]]) -> None:
    back = unflatten(flatten(nested))
    assert {component: list(tensors) for component, tensors in back.items()} == {p: list(t) for p, t in nested.items()}
    assert all(
        back[component][name] is value for component, tensors in nested.items() for name, value in tensors.items()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_tensor_that_is_not_finite_is_found(bad: float) -> None:
    assert first_non_finite({"a": torch.ones(3), "b": torch.tensor([1.0, bad])}) == "b"


def test_large_values_whose_sum_overflows_are_finite() -> None:
    assert first_non_finite({"a": torch.full((4,), 3e38), "n": torch.tensor([2**60])}) is None
    assert first_non_finite({"a": torch.tensor([3e38, 3e38, float("inf"), float("-inf")])}) == "a"
