"""FedACG against hand-derived rounds."""

from __future__ import annotations

import pytest
import torch

from fedfa.algorithms import FedACG, FedAvg, FedProx
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError
from tests.algorithms.quadratics import Quadratics, assert_takes_odd_roles
from tests.algorithms.toy import assert_same_rounds, toy_federation


def test_three_rounds_by_hand() -> None:
    """f_0 = (w − 1)², f_1 = ½ (w + 1)²; η = 0.1, λ = 0.5, β = 2, one client a round, two local steps.

    Round 1, client 0 from 0: gradient −2 → 0.2; then −1.6 + 2·0.2 = −1.2 → 0.32. θ = m = 0.32.
    Round 2, client 1 from 0.32 + 0.16 = 0.48: 1.48 → 0.332; then 1.332 − 2·0.148 = 1.036 → 0.2284. θ = 0.2284,
    m = −0.0916: that is λ m + Δ = 0.16 − 0.2516.
    Round 3, client 0 from 0.2284 − 0.0458 = 0.1826: −1.6348 → 0.34608; then −1.30784 + 2·0.16348 = −0.98088 → 0.444168.
    """
    federation = Quadratics(FedACG(momentum=0.5, beta=2.0), [2, 1], [1, -1], steps=2)
    for cohort, model, m in [([0], 0.32, 0.32), ([1], 0.2284, -0.0916), ([0], 0.444168, 0.215768)]:
        federation.round(cohort)
        assert federation.value == pytest.approx(model, rel=1e-12)
        assert float(federation.state.components["fedacg"]["point.weight"]) == pytest.approx(m, rel=1e-12)


def test_the_momentum_follows_the_papers_recursion() -> None:
    """m ← λ m + mean(θ_i − (θ + λ m)) and θ ← θ + m, for unequal clients of a real network."""
    lam = 0.85
    federation = toy_federation(FedACG(momentum=lam))
    name, momentum = "hidden.weight", torch.zeros(6, 3, dtype=torch.float64)
    for _ in range(3):
        before = federation.state.model[name]
        after = federation.round().model[name]
        updates = [result.contribution["fedavg/model"] for result in federation.results]
        trained = [before + update.tensors[name] / update.weight for update in updates]
        weights = [float(update.weight) for update in updates]
        ahead = before + lam * momentum
        moved = sum(n * (own - ahead) for n, own in zip(weights, trained, strict=True)) / sum(weights)
        momentum = lam * momentum + moved
        torch.testing.assert_close(after, before + momentum, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(federation.state.components["fedacg"][name], momentum, rtol=1e-9, atol=1e-12)


def test_without_momentum_it_is_fedprox_and_without_beta_fedavg_bit_for_bit() -> None:
    assert_same_rounds(toy_federation(FedACG(momentum=0, beta=0.3)), toy_federation(FedProx(mu=0.3)))
    assert_same_rounds(toy_federation(FedACG(momentum=0, beta=0)), toy_federation(FedAvg()))


def test_statistics_are_only_averaged() -> None:
    """Each step adds client + 1: two steps of each of two clients, mean 3; no momentum carries it on."""
    federation = Quadratics(FedACG(), [2, 1], [1, -1], steps=2)
    for expected in (3, 6):
        federation.round()
        assert federation.statistic == pytest.approx(expected, rel=1e-14)


def test_any_roles() -> None:
    assert_takes_odd_roles(FedACG())


@pytest.mark.parametrize("other", ["scaffold", "feddyn", "fednova", "fedprox", "fedavgm", "fedexp", "local"])
def test_what_would_break_it_is_refused(other: str) -> None:
    with pytest.raises(AlgorithmError, match=r"fedacg.{20}"):
        toy_federation(f"fedacg+{other}")
    with pytest.raises(AlgorithmError):
        build_algorithm("fedacg+fedadam")
