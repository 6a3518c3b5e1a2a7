"""Algorithms as objects and as expressions: the same components either way, and back."""

from __future__ import annotations

import tomllib
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfa.algorithms import (
    CCVR,
    Anchors,
    Calibration,
    FedAdam,
    FedAvg,
    FedBN,
    FedFA,
    FedLC,
    FedNova,
    FedProx,
    FinalCalibration,
    Scaffold,
)
from fedfa.algorithms.registry import build_algorithm, expression_of, methods
from fedfa.errors import AlgorithmError
from fedfa.experiment.config import Config
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext
from tests.algorithms.toy import assert_same_rounds, toy_federation

positive = st.floats(1e-6, 10)
share = st.floats(0, 1)
anchors = st.builds(
    Anchors,
    mu=st.floats(0, 10), loss=st.sampled_from(["sample", "class"]), momentum=share,
    class_mean=st.sampled_from(["batch", "exact"]), average=st.sampled_from(["two-epochs", "running"]),
    start=st.sampled_from(["zero", "received"]), absent=st.sampled_from(["keep", "zero"]),
    weights=st.sampled_from(["size", "count"]),
    init=st.sampled_from(["orthogonal", "random", "etf", "a/file.safetensors"]),
    layers=st.sampled_from([(), ("fc2",), ("fc1", "fc2")]),
)  # fmt: skip
calibrations = st.builds(
    Calibration,
    when=st.sampled_from(["step", "epoch", "before", "after", "never"]), optimiser=st.sampled_from(["sgd", "adam"]),
    lr=st.none() | positive, steps=st.integers(1, 5),
)  # fmt: skip
finals = st.builds(FinalCalibration, steps=st.integers(0, 100), lr=positive)
fedfa = st.builds(FedFA, anchors=anchors, calibration=calibrations, final=finals)
fedadam = st.builds(FedAdam, lr=positive, tau=positive, beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.99))
others = st.lists(
    st.one_of(
        st.builds(FedLC, tau=st.floats(0, 5), form=st.sampled_from(["margin", "log"])),
        st.builds(CCVR, samples=st.integers(1, 5000), relu=st.booleans()),
        st.builds(FedBN, layers=st.sampled_from(["all", "batch"])),
        st.builds(FedProx, mu=st.floats(0, 5)),
    ),
    unique_by=type,
)


def with_fedavg(algorithm: Algorithm) -> list[Component]:
    """The components as an experiment uses them: FedAvg's aggregation where no component has one."""
    aggregated = any(component.traits.aggregates for component in algorithm.components)
    return algorithm.components if aggregated else [FedAvg(), *algorithm.components]


@given(mu=st.floats(0, 10), momentum=share, lr=positive)
def test_fedfa_plus_fedadam_is_the_expression_with_the_same_options(mu: float, momentum: float, lr: float) -> None:
    algorithm = FedFA(mu=mu, momentum=momentum) + FedAdam(lr=lr)
    options = {"anchors": {"mu": mu, "momentum": momentum}, "fedadam": {"lr": lr}}
    assert with_fedavg(algorithm) == build_algorithm("fedfa+fedadam", options).components


def test_an_object_without_options_is_the_expression_alone() -> None:
    assert with_fedavg(FedFA() + FedAdam()) == build_algorithm("fedfa+fedadam").components
    assert (FedNova() + FedLC()).components == build_algorithm("fednova+fedlc").components
    assert repr(FedFA(mu=0.2) + FedAdam(lr=0.5)) == (
        "Anchors(mu=0.2) + Calibration() + FinalCalibration() + FedAdam(lr=0.5)"
    )


@given(fedfa, fedadam, others)
def test_an_object_survives_its_expression(fedfa: FedFA, fedadam: FedAdam, others: list[Component]) -> None:
    """Through ``expression_of`` and ``build_algorithm``, and through the text of a config file."""
    algorithm = fedfa + fedadam
    for other in others:
        algorithm = algorithm + other
    expression, options = expression_of(algorithm)
    assert expression == "+".join(["fedfa", "fedadam", *(other.name for other in others)])
    assert build_algorithm(expression, options).components == with_fedavg(algorithm)
    config = Config.resolve({"algorithm": {"name": expression, **options}})
    assert config.build_algorithm().components == with_fedavg(algorithm)
    assert Config.resolve(tomllib.loads(config.to_toml())).build_algorithm().components == with_fedavg(algorithm)
    assert expression_of(build_algorithm(expression, options)) == (f"fedavg+{expression}", options_with_fedavg(options))


def options_with_fedavg(options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {"fedavg": FedAvg().model_dump(), **options}


@pytest.mark.parametrize("first", sorted(methods()))
def test_every_method_and_pair_survives_its_expression(first: str) -> None:
    found = 0
    for expression in (first, *(f"{first}+{second}" for second in sorted(methods()) if second != first)):
        try:
            algorithm = build_algorithm(expression)
        except AlgorithmError:
            continue  # methods that cannot be combined
        assert build_algorithm(*expression_of(algorithm)).components == algorithm.components
        found += 1
    assert found > 1


def test_components_combine_in_any_grouping() -> None:
    components = [FedProx(mu=0.2), FedLC(tau=0.5), FedAdam()]
    left, right = (components[0] + components[1]) + components[2], components[0] + (components[1] + components[2])
    assert left.components == right.components == components
    assert (Scaffold() + FedLC()).components == (FedLC() + Scaffold()).components, "aggregation comes first"
    for one, other in combinations(components, 2):
        assert (one + other + one).components == [one, other], "the same component again changes nothing"


def test_two_components_of_one_name_with_different_options_are_refused() -> None:
    with pytest.raises(AlgorithmError, match="two components are named 'fedprox'; name each method once"):
        FedProx(mu=0.2) + FedProx(mu=0.3)


def test_a_component_of_one_s_own_becomes_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfa.algorithms.registry._METHODS", dict(methods()))

    class Shrink(Component):
        """Pulls features to zero."""

        strength: float = 0.01

        def loss(self, ctx: ClientContext, batch: Batch, loss: Any) -> Any:
            return loss + self.strength * batch.features.square().mean()

    algorithm = FedFA() + Shrink(strength=0.1)
    expression, options = expression_of(algorithm)
    assert (expression, options["shrink"]) == ("fedfa+shrink", {"strength": 0.1})
    assert build_algorithm(expression, options).components == with_fedavg(algorithm)
    assert methods()["shrink"].summary == "Pulls features to zero."

    class FedLC(Component):  # the name of a method of fedfa
        def begin(self, ctx: ClientContext) -> None: ...

    with pytest.raises(AlgorithmError, match="'FedLC' is named 'fedlc', which is a method of fedfa; give it another"):
        expression_of(FedLC())


def test_object_and_expression_train_the_same_bits() -> None:
    table = {"name": "fedfa+fedadam", "anchors": {"mu": 0.2}, "fedadam": {"lr": 0.05}}
    assert_same_rounds(toy_federation(FedFA(mu=0.2) + FedAdam(lr=0.05)), toy_federation(table))
