"""Fixed point: rounding, exact sums in every order, the same bits with masks and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfa.algorithms.registry import methods
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ClientError, ConfigError
from fedfa.learning.aggregate import Aggregate, WeightedSum
from fedfa.protection.secure.encoding import FRACTION_BITS, FixedPoint, Layout
from tests.protection.small import experiment, one_round
from tests.protection.test_secure_sum import Session, added


def contributions(seed: int, clients: int, size: float) -> list[dict[str, WeightedSum]]:
    draw = np.random.default_rng(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.from_numpy(size * draw.standard_normal(shape)).float()

    made = [
        {
            "a/model": WeightedSum.of({"w": values(3, 2), "b": values(2)}, float(draw.integers(1, 600))),
            "b/rows": WeightedSum.of({"x": values(4, 2)}, torch.from_numpy(draw.integers(0, 9, (4, 1))).float()),
        }
        for _ in range(clients)
    ]
    return [FixedPoint(clients=clients).protect(None, one) for one in made]  # type: ignore[arg-type]


@given(st.integers(0, 2**31), st.integers(1, 40), st.sampled_from([1e-7, 1.0, 300.0]))
def test_the_sum_of_integers_is_that_in_double_precision_in_every_order(seed: int, clients: int, size: float) -> None:
    each = contributions(seed, clients, size)
    layout = Layout.of(each[0])
    vector = added([layout.to_vector(one) for one in each])
    decoded = layout.to_contribution(vector)
    for order in (range(clients), reversed(range(clients))):
        total = Aggregate()
        for k in order:
            total.add(each[k])
        for group in total.groups:
            assert torch.equal(total[group].weight, decoded[group].weight)
            for name, value in total[group].tensors.items():
                assert torch.equal(value, decoded[group].tensors[name])


@given(st.floats(-1e6, 1e6))
def test_values_are_rounded_to_the_nearest_multiple(value: float) -> None:
    entry = WeightedSum({"x": torch.tensor([value], dtype=torch.float64)}, torch.tensor(1.0))
    rounded = FixedPoint(clients=10).protect(None, {"a/b": entry})["a/b"].tensors["x"]  # type: ignore[arg-type]
    assert abs(float(rounded) - value) <= 2.0 ** -(FRACTION_BITS + 1)
    assert float(rounded * 2**FRACTION_BITS).is_integer()


def test_what_could_overflow_is_refused_and_the_largest_values_do_not() -> None:
    encoding = FixedPoint(clients=100)
    most = encoding.largest
    assert most == 5368709.0
    fits = {"a/b": WeightedSum({"x": torch.tensor([most, -most], dtype=torch.float64)}, torch.tensor(1.0))}
    layout = Layout.of(fits)
    vector = added([layout.to_vector(fits)] * 100)
    assert layout.to_contribution(vector)["a/b"].tensors["x"].tolist() == [100 * most, -100 * most]
    for bad in (most + 1, float("inf"), float("nan")):
        with pytest.raises(AlgorithmError, match="has room for"):
            encoding.protect(None, {"a/b": WeightedSum({"x": torch.tensor([bad])}, torch.tensor(1.0))})  # type: ignore[arg-type]


def test_what_a_layout_does_not_expect_is_refused_and_what_is_missing_is_zero() -> None:
    whole = {"a/b": WeightedSum({"x": torch.ones(2)}, torch.tensor(1.0)), "c/d": WeightedSum({}, torch.tensor(2.0))}
    layout = Layout.of(whole)
    assert layout.length == 4
    part = layout.to_contribution(layout.to_vector({"c/d": whole["c/d"]}))
    assert part["a/b"].tensors["x"].tolist() == [0.0, 0.0]
    assert float(part["c/d"].weight) == 2.0
    with pytest.raises(AlgorithmError, match="did not expect 'e/f#weight'"):
        layout.to_vector({**whole, "e/f": whole["c/d"]})
    with pytest.raises(AlgorithmError, match="has shape"):
        layout.to_vector({"a/b": WeightedSum({"x": torch.ones(3)}, torch.tensor(1.0))})


@pytest.mark.parametrize("method", ["fedfa", "scaffold", "fedadam"])
def test_a_round_through_the_protocol_has_the_simulators_bits(method: str, blobs: DataSet) -> None:
    """What the server obtains from masked vectors, with a client lost, is the simulator's aggregate without it."""
    made = experiment(blobs, {"privacy": {"masks": True}}, method, partition="shards:2")
    _, statistics = one_round(made)
    layout = Layout.of(statistics.results[0].contribution)
    inputs = {result.client: layout.to_vector(result.contribution) for result in statistics.results}
    decoded = layout.to_contribution(Session(inputs, lost={2: 3}).run())
    plain = Aggregate()
    for result in statistics.results:
        if result.client != 2:
            plain.add(result.contribution)
    masked = plain.with_sums(decoded)
    states = [made.training.server_step(made.state, aggregate).to_tensors() for aggregate in (plain, masked)]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_the_encoding_hardly_changes_a_round(blobs: DataSet) -> None:
    plain, _ = one_round(experiment(blobs, {}, "fedfa"))
    encoded, _ = one_round(experiment(blobs, {"privacy": {"masks": True}}, "fedfa"))
    for name, value in plain.to_tensors().items():
        assert torch.allclose(encoded.to_tensors()[name].double(), value.double(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in methods() if name != "fedbn"])
def test_every_method_runs_in_fixed_point_or_refuses_with_a_reason(method: str, blobs: DataSet) -> None:
    settings = {"privacy": {"masks": True}}
    if method in ("matching", "centralised", "local", "fedproto", "fedrep", "ditto"):
        with pytest.raises(
            AlgorithmError, match=r"privacy.masks = true cannot be used \w+|rule out evaluations of single"
        ):
            experiment(blobs, settings, method)
        return
    made = experiment(blobs, settings, method, partition="shards:2")
    records = list(made.rounds(1, progress=False))
    assert records[0].train_loss is None


def test_masks_go_with_noise_and_not_with_robust_rules(blobs: DataSet) -> None:
    made = experiment(blobs, {"privacy": {"masks": True, "noise": 1.0}}, "fedfa", rounds=1)
    assert [component.name for component in made.algorithm.components[-2:]] == ["privacy", "encoding"]
    assert len(list(made.rounds(progress=False))) == 1
    with pytest.raises(ConfigError, match="single contributions, which masks hide"):
        experiment(blobs, {"privacy": {"masks": True}, "aggregation": {"rule": "median"}})


def test_a_client_whose_values_do_not_fit_is_named(blobs: DataSet) -> None:
    made = experiment(blobs, {"privacy": {"masks": True}})
    huge = made.training.init()
    made._state = type(huge)(0, {name: value * 1e30 for name, value in huge.model.items()}, huge.components)
    with pytest.raises(ClientError, match=r"client 0, round 1, protecting the contribution: secure sums|not finite"):
        one_round(made)
