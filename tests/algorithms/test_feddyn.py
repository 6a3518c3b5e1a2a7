"""FedDyn against hand-derived rounds, and its fixed point against FedAvg's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedfa.algorithms import FedAvg, FedDyn
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError
from tests.algorithms.quadratics import (
    Quadratics,
    assert_takes_clients_without_a_step,
    assert_takes_odd_roles,
    averaged_fixed_point,
    optimum,
    quadratics,
    random_cohorts,
)
from tests.algorithms.toy import assert_same_rounds, toy_federation


def test_three_rounds_by_hand() -> None:
    """Two clients, one active per round: f_0 = (w − 1)², f_1 = ½ (w + 1)²; α = 0.5, η = 0.1, one step, then two.

    Round 1, client 0 from θ = 0: gradient −2, θ_0 = 0.2. g_0 = −0.5·0.2 = −0.1; h = −0.5·0.2/2 = −0.05 (m = 2 clients,
    not the one that was active); θ = 0.2 − h/α = 0.3.
    Round 2, client 1 from 0.3: gradient 1.3, θ_1 = 0.17. g_1 = 0.5·0.13 = 0.065; h = −0.05 + 0.25·0.13 = −0.0175;
    θ = 0.17 + 0.035 = 0.205. Client 0 keeps its g_0.
    Round 3, client 0 with two steps from 0.205: 2·(−0.795) + 0.1 = −1.49 → 0.354; then 2·(−0.646) + 0.1 + 0.5·0.149 =
    −1.1175 → 0.46575. g_0 = −0.1 − 0.5·0.26075 = −0.230375; h = −0.0175 − 0.25·0.26075 = −0.0826875;
    θ = 0.46575 + 0.165375 = 0.631125.
    """
    federation = Quadratics(FedDyn(alpha=0.5), [2, 1], [1, -1])
    expected = [([0], 0.3, -0.05), ([1], 0.205, -0.0175), ([0], 0.631125, -0.0826875)]
    for number, (cohort, model, h) in enumerate(expected):
        federation.steps = [2, 2] if number == 2 else [1, 1]
        federation.round(cohort)
        assert federation.value == pytest.approx(model, rel=1e-13)
        assert float(federation.state.components["feddyn"]["point.weight"]) == pytest.approx(h, rel=1e-13)
        if number == 1:
            assert federation.client_value(0, "feddyn") == pytest.approx(-0.1, rel=1e-13)
    assert federation.client_value(0, "feddyn") == pytest.approx(-0.230375, rel=1e-13)
    assert federation.client_value(1, "feddyn") == pytest.approx(0.065, rel=1e-13)


def test_a_round_of_all_counts_clients_equally_whatever_their_sizes() -> None:
    """From 0: θ_0 = 0.2, θ_1 = −0.1; their even mean is 0.05, h = −0.5·0.05, θ = 0.05 + 0.05 = 0.1."""
    federation = Quadratics(FedDyn(alpha=0.5), [2, 1], [1, -1], sizes=[9, 1])
    federation.round()
    assert federation.value == pytest.approx(0.1, rel=1e-13)


@pytest.mark.parametrize(("cohort_size", "decay", "rounds"), [(3, 0.0, 35), (2, 0.3, 65)])
def test_it_reaches_the_optimum_of_the_sum_where_fedavg_does_not(cohort_size: int, decay: float, rounds: int) -> None:
    """Heterogeneous quadratics, three local steps.

    A fixed point has θ_i = θ for all clients, so each local gradient ∇f_i(θ) − g_i vanishes and h = mean g_i = 0, hence
    Σ ∇f_i(θ) = 0, however few the local steps. With weight decay λ the same holds of f_i + λ/2 ‖w‖². FedAvg settles
    where Σ (I − M_i)(w − b_i) = 0, M_i = (I − η A_i)^3, which is elsewhere.
    """
    A, b = quadratics()
    federation = Quadratics(FedDyn(alpha=1.0), A, b, steps=3, lr=0.3, weight_decay=decay)
    for cohort in random_cohorts(3, cohort_size, rounds):
        federation.round(cohort)
    np.testing.assert_allclose(federation.w, optimum(A, b, decay=decay), rtol=0, atol=1e-6)
    for client in range(3):  # the dual states have become the gradients
        gradient = A[client] @ (federation.w - b[client]) + decay * federation.w
        dual = federation.client_states[client]["feddyn"]["point.weight"][0]
        np.testing.assert_allclose(dual, gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cohort_size", [3, 2])
def test_with_the_mean_size_it_reaches_the_optimum_weighted_by_samples(cohort_size: int) -> None:
    """α_i = α n̄/n_i: settled, Σ g_i/α_i = 0 with g_i = ∇f_i, hence Σ n_i ∇f_i = 0."""
    (A, b), sizes = quadratics(), [1, 2, 4]
    federation = Quadratics(FedDyn(alpha=1.0, mean_size=7 / 3), A, b, steps=3, lr=0.2, sizes=sizes)
    for cohort in random_cohorts(3, cohort_size, 120):
        federation.round(cohort)
    np.testing.assert_allclose(federation.w, optimum(A, b, weights=sizes), rtol=0, atol=1e-6)
    assert np.linalg.norm(federation.w - optimum(A, b)) > 0.2


def test_the_mean_size_by_hand() -> None:
    """Sizes 3 and 1, n̄ = 2, α = 0.6: α_0 = 0.4, α_1 = 1.2.

    Round 1 from 0: θ_0 = 0.2, θ_1 = −0.1; g_0 = −0.4·0.2 = −0.08, g_1 = 0.12; θ = 0.05 + 0.05 = 0.1, as without n̄.
    Round 2 from 0.1: gradients −1.8 + 0.08 and 1.1 − 0.12; θ_0 = 0.272, θ_1 = 0.002, mean change 0.037; h/α = −0.05 −
    0.037, so θ = 0.137 + 0.087 = 0.224.
    """
    federation = Quadratics(FedDyn(alpha=0.6, mean_size=2), [2, 1], [1, -1], sizes=[3, 1])
    for model in (0.1, 0.224):
        federation.round()
        assert federation.value == pytest.approx(model, rel=1e-12)


def test_equal_clients_of_the_mean_size_are_as_without_it() -> None:
    one, other = (Quadratics(FedDyn(mean_size=size), [2, 1], [1, -1], sizes=[5, 5]) for size in (None, 5))
    for _ in range(3):
        one.round()
        other.round()
    assert one.value == other.value


def test_fedavg_settles_elsewhere() -> None:
    """The contrast to the test above, with its fixed point in closed form."""
    A, b = quadratics()
    federation = Quadratics(FedAvg(), A, b, steps=3, lr=0.3)
    for _ in range(20):
        federation.round()
    np.testing.assert_allclose(federation.w, averaged_fixed_point(A, b, [3] * 3, 0.3), rtol=0, atol=1e-8)
    assert np.linalg.norm(federation.w - optimum(A, b)) > 0.2


def test_absent_clients_keep_their_dual_state_bit_for_bit() -> None:
    federation = toy_federation(FedDyn())
    federation.round()
    before = {name: value.clone() for name, value in federation.client_states[0]["feddyn"].items()}
    federation.round([1, 2])
    federation.round([2])
    assert before.keys() == federation.state.model.keys()
    assert all(torch.equal(value, federation.client_states[0]["feddyn"][name]) for name, value in before.items())


def test_h_is_the_mean_of_all_dual_states() -> None:
    """Also of those that were not active, over rounds of different cohorts of a real network."""
    federation = toy_federation(FedDyn(), momentum=0.5)
    for cohort in ([0], [1, 2], [0, 2]):
        federation.round(cohort)
    for name, h in federation.state.components["feddyn"].items():
        mean = sum(federation.client_states[client]["feddyn"][name] for client in range(3)) / 3
        torch.testing.assert_close(h, mean, rtol=1e-12, atol=1e-15)


def test_without_alpha_it_is_fedavg_with_equal_weights_bit_for_bit() -> None:
    federation = toy_federation(FedDyn(alpha=0.0))
    assert_same_rounds(federation, toy_federation(FedAvg(weighting="uniform")))
    assert not any(client_state.get("feddyn") for client_state in federation.client_states.values())


def test_statistics_are_only_averaged() -> None:
    """Each step adds client + 1: after two steps each (2 + 4)/2; no share of h goes into it."""
    federation = Quadratics(FedDyn(), [2, 1], [1, -1], steps=2)
    federation.round()
    assert federation.statistic == pytest.approx(3, rel=1e-14)


def test_h_is_not_sent() -> None:
    federation = toy_federation(FedDyn())
    federation.round()
    assert "feddyn" not in federation.plan().broadcast


def test_any_roles_and_clients_without_a_step() -> None:
    assert_takes_odd_roles(FedDyn())
    assert_takes_clients_without_a_step(FedDyn())


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ("feddyn+fedadam", "its server step"),
        ("feddyn+fedavgm", "its server step"),
        ("feddyn+fedprox", "algorithm.feddyn.alpha"),
        ("feddyn+scaffold", "only one component can turn the clients' updates into the server's update"),
    ],
)
def test_what_would_break_it_is_refused(algorithm: str, reason: str) -> None:
    with pytest.raises(AlgorithmError, match=reason):
        build_algorithm(algorithm)
