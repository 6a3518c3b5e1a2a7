"""FedNova against hand-derived rounds, exact normalisation of linear losses, and both fixed points of quadratics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fedfa.algorithms import FedAvg, FedNova, FedProx
from fedfa.algorithms.fednova import coefficient_sum
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError
from tests.algorithms.quadratics import (
    Quadratics,
    assert_takes_clients_without_a_step,
    assert_takes_odd_roles,
    averaged_fixed_point,
    optimum,
    quadratics,
)
from tests.algorithms.toy import toy_federation


def test_one_round_by_hand() -> None:
    """f_0 = (w − 1)² with 1 sample and 2 steps, f_1 = ½ (w + 1)² with 3 samples and 1 step; η = 0.1, from 0.

    Δ_0 = 0.36, Δ_1 = −0.1; p = ¼, ¾; τ_eff = ¼·2 + ¾·1 = 1.25. Mean direction ¼·0.18 + ¾·(−0.1) = −0.03; w = −0.0375.
    (FedAvg: ¼·0.36 − ¾·0.1 = 0.015, to the other side.) The statistic is FedAvg's: ¼·2 + ¾·2 = 2.
    """
    federation = Quadratics(FedNova(), [2, 1], [1, -1], steps=[2, 1], sizes=[1, 3])
    federation.round()
    assert federation.value == pytest.approx(-0.0375, rel=1e-12)
    assert federation.statistic == pytest.approx(2, rel=1e-14)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 2.0), (0.5, 2.0), (0.9, 9.0)])
def test_linear_losses_are_normalised_exactly(momentum: float, mu: float) -> None:
    """With f_i = g_i·w the gradient is g_i throughout, so Δ_i = −η (Σ_k a_{i,k}) g_i for any local optimiser.

    Hence w must move by exactly −η τ_eff Σ p_i g_i, along the gradient of the sum, however unequal the steps (7, 3, 1).
    The optimiser that makes the steps is torch's own.
    """
    g, steps, sizes, lr = np.array([[1.0, 0.0], [-2.0, 1.0], [0.5, -3.0]]), [7, 3, 1], [1, 2, 5], 0.1
    zero = np.zeros((3, 2, 2))
    federation = Quadratics(FedNova(mu=mu), zero, g, g=g, steps=steps, sizes=sizes, lr=lr, momentum=momentum)
    federation.round()
    p = np.array(sizes) / 8
    effective = sum(share * coefficient_sum(k, momentum, lr * mu) for share, k in zip(p, steps, strict=True))
    np.testing.assert_allclose(federation.w, -lr * effective * (p @ g), rtol=1e-12)


def test_the_coefficients_of_the_paper() -> None:
    """Momentum ρ: a_k = (1 − ρ^{τ−k})/(1 − ρ); proximal term: a_k = (1 − ημ)^{τ−1−k}; k = 0 … τ−1."""
    k, tau, rho, pull = np.arange(6), 6, 0.7, 0.15
    assert coefficient_sum(tau, 0.0, 0.0) == tau
    assert coefficient_sum(tau, rho, 0.0) == pytest.approx(((1 - rho ** (tau - k)) / (1 - rho)).sum(), rel=1e-13)
    assert coefficient_sum(tau, 0.0, pull) == pytest.approx(((1 - pull) ** (tau - 1 - k)).sum(), rel=1e-13)
    assert coefficient_sum(0, rho, pull) == 0


def test_momentum_and_proximal_term_together_by_hand() -> None:
    """ρ = ½, ημ = ½, unit gradients: v₁ = 1, x₁ = 1; v₂ = ½ + 1 − ½ = 1, x₂ = 2; v₃ = ½ + 1 − 1 = ½, x₃ = 2.5."""
    assert [coefficient_sum(k, 0.5, 0.5) for k in (1, 2, 3)] == [1.0, 2.0, 2.5]


def test_unequal_steps_no_longer_bias_the_objective() -> None:
    """Quadratic clients with 6, 2 and 1 steps. With M_i = (I − η A_i)^{K_i}:

    FedAvg settles where Σ p_i (I − M_i)(w − b_i) = 0. As η → 0, I − M_i → η K_i A_i: the optimum of Σ p_i K_i f_i,
    however small the steps.
    FedNova settles where Σ p_i (I − M_i)/K_i (w − b_i) = 0, which tends to Σ p_i A_i (w − b_i) = 0: the optimum itself,
    with an error of first order in η.
    """
    (A, b), steps, sizes = quadratics(), [6, 2, 1], [2, 3, 5]
    for algorithm, scales in ((FedAvg(), 1.0), (FedNova(), 1 / np.array(steps))):
        federation = Quadratics(algorithm, A, b, steps=steps, sizes=sizes, lr=0.3)
        for _ in range(40):
            federation.round()
        expected = averaged_fixed_point(A, b, steps, 0.3, weights=sizes, scales=scales)
        np.testing.assert_allclose(federation.w, expected, rtol=0, atol=1e-7)

    right, wrong = optimum(A, b, weights=sizes), optimum(A, b, weights=np.array(sizes) * steps)
    errors = {
        lr: np.linalg.norm(averaged_fixed_point(A, b, steps, lr, weights=sizes, scales=1 / np.array(steps)) - right)
        for lr in (1e-3, 2e-3)
    }
    assert errors[2e-3] / errors[1e-3] == pytest.approx(2, rel=0.01)
    assert np.linalg.norm(averaged_fixed_point(A, b, steps, 1e-6, weights=sizes) - wrong) < 1e-4
    assert np.linalg.norm(wrong - right) > 0.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_it_is_fedavg_up_to_rounding(momentum: float) -> None:
    nova, plain = (toy_federation(algorithm, momentum=momentum, steps=5) for algorithm in (FedNova(), FedAvg()))
    for _ in range(2):
        assert_close(nova.round().model, plain.round().model, rtol=1e-12, atol=1e-15)


def test_with_equal_steps_and_mu_it_is_fedprox_up_to_rounding() -> None:
    nova = toy_federation(FedNova(mu=0.7), momentum=0.5, steps=5)
    prox = toy_federation(FedProx(mu=0.7), momentum=0.5, steps=5)
    for _ in range(2):
        assert_close(nova.round().model, prox.round().model, rtol=1e-12, atol=1e-15)


def test_one_client_is_plain_sgd() -> None:
    """Normalised and scaled back by the same number: 1 + 0.8³ · (3 − 1)."""
    federation = Quadratics(FedNova(), [2], [1], steps=3, start=[3.0])
    federation.round()
    assert federation.value == pytest.approx(1 + 0.8**3 * 2, rel=1e-13)


def test_a_client_without_a_step_has_no_weight() -> None:
    """Of the toy's clients only the third trains (see the helper): the result is its own, as if it were alone."""
    assert_takes_clients_without_a_step(FedNova())
    all_three, alone = (toy_federation(FedNova(), batch_size=12, drop_last=True) for _ in range(2))
    all_three.round()
    alone.round([2])
    for name, value in all_three.state.model.items():
        assert torch.equal(value, alone.state.model[name])


def test_any_roles() -> None:
    assert_takes_odd_roles(FedNova(mu=0.1))


def test_what_it_cannot_normalise_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"algorithm\.fednova\.mu"):
        build_algorithm("fednova+fedprox")
    with pytest.raises(AlgorithmError, match="keep their product below 1"):
        toy_federation(FedNova(mu=10.0), lr=0.1)
