"""SCAFFOLD against hand-derived rounds, and its fixed point against FedAvg's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import FedAvg, Scaffold
from fedfa.errors import AlgorithmError
from fedfa.learning.tensors import clone
from tests.algorithms.quadratics import (
    Quadratics,
    assert_takes_clients_without_a_step,
    assert_takes_odd_roles,
    averaged_fixed_point,
    optimum,
    quadratics,
    random_cohorts,
)
from tests.algorithms.toy import CLASSES, INPUTS, Network, assert_same_rounds, toy_federation, toy_samples


def control_value(federation: Quadratics) -> float:
    return float(federation.state.components["scaffold"]["point.weight"])


def test_three_rounds_by_hand() -> None:
    """Two clients, one active per round: f_0 = (w − 1)², f_1 = ½ (w + 1)²; η = 0.1, K = 2, option II.

    Round 1, client 0 from x = 0, no correction: gradients −2, −1.6; y = 0.36. c_0 = −0.36/(2·0.1) = −1.8, their mean.
    c = ½·(−1.8) = −0.9 (one of two clients).
    Round 2, client 1 from 0.36, correction c − c_1 = −0.9: gradients 1.36, 1.314 become 0.46, 0.414; y = 0.2726.
    c_1 = 0 + 0.9 + 0.0874/0.2 = 1.337, the mean of the uncorrected; c = −0.9 + ½·1.337 = −0.2315.
    Round 3, client 0 from 0.2726, correction −0.2315 + 1.8 = 1.5685: gradients −1.4548, −1.47754; y = 0.252134.
    c_0 = −1.46617; c = −0.2315 + ½·(−1.46617 + 1.8) = −0.064585.
    """
    federation = Quadratics(Scaffold(), [2, 1], [1, -1], steps=2)
    for cohort, model, c in [([0], 0.36, -0.9), ([1], 0.2726, -0.2315), ([0], 0.252134, -0.064585)]:
        federation.round(cohort)
        assert federation.value == pytest.approx(model, rel=1e-12)
        assert control_value(federation) == pytest.approx(c, rel=1e-12)
    assert federation.client_value(0, "scaffold") == pytest.approx(-1.46617, rel=1e-12)
    assert federation.client_value(1, "scaffold") == pytest.approx(1.337, rel=1e-12)


def test_the_global_step_size_scales_the_model_alone() -> None:
    """Round 1 of the test above with η_g = ½: x = 0.18, c = −0.9; the statistic (two steps of 1) stays 2."""
    federation = Quadratics(Scaffold(server_lr=0.5), [2, 1], [1, -1], steps=2)
    federation.round([0])
    assert [federation.value, control_value(federation)] == pytest.approx([0.18, -0.9], rel=1e-13)
    assert federation.statistic == pytest.approx(2, rel=1e-14)


@pytest.mark.parametrize(("weighting", "model", "c"), [("uniform", 0.05, -0.5), ("samples", 0.125, -1.25)])
def test_one_weighting_for_models_and_control_variates(weighting: str, model: float, c: float) -> None:
    """One step from 0: Δy = 0.2 and −0.1, Δc = −2 and 1. Even means: 0.05, −0.5. By 3 : 1 samples: 0.125, −1.25."""
    federation = Quadratics(Scaffold(weighting=weighting), [2, 1], [1, -1], sizes=[3, 1])
    federation.round()
    assert [federation.value, control_value(federation)] == pytest.approx([model, c], rel=1e-13)


@pytest.mark.parametrize(("cohort_size", "decay", "rounds"), [(3, 0.0, 35), (2, 0.3, 65)])
def test_it_reaches_the_optimum_of_the_sum_where_fedavg_does_not(cohort_size: int, decay: float, rounds: int) -> None:
    """Heterogeneous quadratics, three local steps.

    With c_i = ∇f_i(x) and c = mean c_i = 0 every corrected gradient at x vanishes: the optimum of the sum is a fixed
    point for any K. There is no other: y_i = x for all i needs ∇f_i(x) − c_i + c = 0, and c is the mean of the c_i.
    Weight decay λ is part of each gradient, so the optimum is that of Σ f_i + λ/2 ‖w‖². FedAvg settles elsewhere: see
    the closed form in the test below.
    """
    A, b = quadratics()
    federation = Quadratics(Scaffold(), A, b, steps=3, lr=0.3, weight_decay=decay)
    for cohort in random_cohorts(3, cohort_size, rounds):
        federation.round(cohort)
    np.testing.assert_allclose(federation.w, optimum(A, b, decay=decay), rtol=0, atol=1e-6)
    for client in range(3):  # the control variates have become the gradients, weight decay included
        gradient = A[client] @ (federation.w - b[client]) + decay * federation.w
        np.testing.assert_allclose(
            federation.client_states[client]["scaffold"]["point.weight"][0], gradient, rtol=0, atol=1e-5
        )


def test_with_sizes_as_weights_it_reaches_the_weighted_optimum() -> None:
    A, b = quadratics()
    sizes = [1, 2, 4]
    federation = Quadratics(Scaffold(weighting="samples"), A, b, steps=3, lr=0.3, sizes=sizes)
    for _ in range(35):
        federation.round()
    np.testing.assert_allclose(federation.w, optimum(A, b, weights=sizes), rtol=0, atol=1e-6)


def test_with_sizes_as_weights_it_reaches_the_weighted_optimum_with_two_of_six_clients() -> None:
    """Six convex clients of very unequal sizes, two of them in a round.

    c ← c + Σ_S n_i Δc_i / n keeps c = Σ n_i c_i / n, whoever is active; with |S|/N times the cohort's mean it stalls.
    """
    A, b = quadratics(clients=6)
    sizes = np.array([1, 20, 3, 8, 2, 12])
    federation = Quadratics(Scaffold(weighting="samples"), A, b, steps=3, lr=0.2, sizes=list(sizes))
    for cohort in random_cohorts(6, 2, 300):
        federation.round(cohort)
    gradient = np.einsum("i,ijk,ik->j", sizes / sizes.sum(), A, federation.w - b)
    assert np.linalg.norm(gradient) < 1e-6
    np.testing.assert_allclose(federation.w, optimum(A, b, weights=sizes), rtol=0, atol=1e-6)
    variates = [federation.client_states[i]["scaffold"]["point.weight"][0].numpy() for i in range(6)]
    c = federation.state.components["scaffold"]["point.weight"][0].numpy()
    np.testing.assert_allclose(c, np.average(variates, axis=0, weights=sizes), rtol=0, atol=1e-12)


def test_with_sizes_as_weights_partial_rounds_by_hand() -> None:
    """One step from 0 with client 0 of two (3 and 1 samples): Δc_0 = −2, y = 0.2.

    Seen so far: 3 samples of one client, so n is taken to be 6 and c = 3·(−2)/6 = −1. Then client 1 from 0.2, corrected
    by c − c_1 = −1: gradient 1.2 becomes 0.2, y = 0.18; c_1 = 1.2. Now n = 4: c = (3·(−2) + 1·1.2)/4 = −1.2.
    """
    federation = Quadratics(Scaffold(weighting="samples"), [2, 1], [1, -1], sizes=[3, 1])
    for cohort, model, c in [([0], 0.2, -1.0), ([1], 0.18, -1.2)]:
        federation.round(cohort)
        assert [federation.value, control_value(federation)] == pytest.approx([model, c], rel=1e-12)


def test_fedavg_settles_elsewhere() -> None:
    A, b = quadratics()
    federation = Quadratics(FedAvg(), A, b, steps=3, lr=0.3)
    for _ in range(20):
        federation.round()
    np.testing.assert_allclose(federation.w, averaged_fixed_point(A, b, [3] * 3, 0.3), rtol=0, atol=1e-8)
    assert np.linalg.norm(federation.w - optimum(A, b)) > 0.2


def test_unequal_numbers_of_steps_are_counted_as_they_were_made() -> None:
    """c_i must come out as the mean of the gradients met: −2, −1.6 and −1.28 for three steps, 1 for one."""
    federation = Quadratics(Scaffold(), [2, 1], [1, -1], steps=[3, 1])
    federation.round()
    assert federation.client_value(0, "scaffold") == pytest.approx(-4.88 / 3, rel=1e-12)
    assert federation.client_value(1, "scaffold") == pytest.approx(1.0, rel=1e-12)


def test_the_control_variate_follows_this_round_s_learning_rate() -> None:
    """Round 2 at half the rate from x = 0.2, one client (c = c_0, no correction): gradient −1.6, whatever η is."""
    federation = Quadratics(Scaffold(), [2], [1])
    federation.round()
    federation.local = federation.local.model_copy(update={"lr": 0.05})
    federation.round()
    assert federation.value == pytest.approx(0.28, rel=1e-13)
    assert federation.client_value(0, "scaffold") == pytest.approx(-1.6, rel=1e-12)


def test_one_client_is_plain_sgd_however_long() -> None:
    """c = c_0, so nothing is corrected: after three rounds of two steps, 1 + (1 − 0.2)^6 · (3 − 1)."""
    federation = Quadratics(Scaffold(), [2], [1], steps=2, start=[3.0])
    for _ in range(3):
        federation.round()
    assert federation.value == pytest.approx(1 + 0.8**6 * 2, rel=1e-12)


def test_the_first_round_is_fedavg_with_equal_weights_bit_for_bit() -> None:
    """All control variates are zero; the difference begins in round two."""
    federation, plain = toy_federation(Scaffold()), toy_federation(FedAvg(weighting="uniform"))
    assert_same_rounds(federation, plain, rounds=1)
    federation.round()
    plain.round()
    assert not torch.equal(federation.state.model["hidden.weight"], plain.state.model["hidden.weight"])


def test_absent_clients_keep_their_control_variate_bit_for_bit() -> None:
    federation = toy_federation(Scaffold())
    federation.round()
    before = clone(federation.client_states[0]["scaffold"])
    federation.round([1, 2])
    federation.round([2])
    assert before.keys() == federation.state.model.keys()
    assert all(torch.equal(value, federation.client_states[0]["scaffold"][name]) for name, value in before.items())


@pytest.mark.parametrize("option", [1, 2])
def test_c_is_the_mean_of_all_control_variates(option: int) -> None:
    """c ← c + |S|/N · mean Δc keeps it so, whoever is active."""
    federation = toy_federation(Scaffold(option=option))
    for cohort in ([0], [1, 2], [0, 2]):
        federation.round(cohort)
    for name, c in federation.state.components["scaffold"].items():
        mean = sum(federation.client_states[client]["scaffold"][name] for client in range(3)) / 3
        assert_close(c, mean, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("drop_last", [False, True])
def test_option_one_is_the_gradient_at_the_received_model(drop_last: bool) -> None:
    """∇ of the mean cross-entropy over all the client's data at x, plus λ x: none is always left out, see drop_last."""
    federation = toy_federation(Scaffold(option=1), weight_decay=0.1, drop_last=drop_last)
    network = Network().double()
    network.load_state_dict(federation.state.model)
    federation.round()
    for client, (x, y) in enumerate(toy_samples(1)):
        loss = functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(y))
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        for (name, parameter), gradient in zip(network.named_parameters(), gradients, strict=True):
            expected = gradient + 0.1 * parameter.detach()
            assert_close(federation.client_states[client]["scaffold"][name], expected, rtol=1e-10, atol=1e-14)


def test_the_pass_of_option_one_leaves_no_trace() -> None:
    """In the first round no option corrects anything, so models and BatchNorm's statistics must agree bit for bit."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES))

    one, two = (toy_federation(Scaffold(option=option), network=network, drop_last=True) for option in (1, 2))
    assert_same_rounds(one, two, rounds=1)
    assert float(one.state.model["1.running_var"].std()) > 0


def test_any_roles_and_clients_without_a_step() -> None:
    for option in (1, 2):
        assert_takes_odd_roles(Scaffold(option=option))
        federation = assert_takes_clients_without_a_step(Scaffold(option=option))
        assert not federation.client_states[0]["scaffold"]["hidden.weight"].any()


def test_local_momentum_is_refused_where_it_would_break_the_identity() -> None:
    with pytest.raises(AlgorithmError, match=r"local\.momentum = 0\.9.*option = 1"):
        toy_federation(Scaffold(), momentum=0.9)
    toy_federation(Scaffold(option=1), momentum=0.9).round()
