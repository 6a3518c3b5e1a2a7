"""Averaging over rounds: by hand, beside the training that it must leave alone, and what it does not touch."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fedfa.algorithms import Averaging, FedAvg, FedDyn
from tests.algorithms.quadratics import Quadratics, assert_takes_odd_roles
from tests.algorithms.toy import assert_same_rounds, toy_federation


def test_three_rounds_by_hand() -> None:
    """f = ½ (w − 1)², η = 0.1, one step a round: z = 0.1, 0.19, 0.271.

    x is their mean until 1/(t + 1) falls below the rate 0.4: 0.1; 0.145; then 0.145 + 0.4 (0.271 − 0.145) = 0.1954.
    """
    federation = Quadratics(Averaging(rate=0.4), [1], [1], steps=1)
    for evaluated, ahead in [(0.1, 0.0), (0.145, 0.045), (0.1954, 0.0756)]:
        federation.round()
        assert federation.value == pytest.approx(evaluated, rel=1e-12)
        assert float(federation.state.components["averaging"]["point.weight"]) == pytest.approx(ahead, abs=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedfa", "fedavgm", "scaffold"])
def test_clients_train_as_without_it(method: str) -> None:
    """What they receive is the method's own model, and what is evaluated is the average of these models."""
    plain, averaged = (
        toy_federation(method),
        toy_federation({"name": f"{method}+averaging", "averaging": {"rate": 0.3}}),
    )
    expected = {name: torch.zeros_like(value) for name, value in plain.state.model.items()}
    for round in range(5):
        trained, evaluated = plain.round().model, averaged.round().model
        rate = max(0.3, 1 / (round + 1))
        sent = averaged.training.algorithm.sent(averaged.state.components, averaged.state.model)
        for name, value in trained.items():
            expected[name] += rate * (value - expected[name])
            assert_close(sent[name], value, rtol=1e-6, atol=1e-9)
            assert_close(evaluated[name], expected[name], rtol=1e-6, atol=1e-9)


def test_at_rate_one_it_is_the_method_itself_bit_for_bit() -> None:
    assert_same_rounds(toy_federation(FedDyn() + Averaging(rate=1)), toy_federation(FedDyn()))


def test_statistics_are_those_of_the_last_round() -> None:
    """Each step adds client + 1: two steps of each of two clients, mean 3."""
    federation = Quadratics(FedAvg() + Averaging(), [2, 1], [1, -1], steps=2)
    for expected in (3, 6, 9):
        federation.round()
        assert federation.statistic == pytest.approx(expected, rel=1e-14)


def test_any_roles() -> None:
    assert_takes_odd_roles(Averaging())
