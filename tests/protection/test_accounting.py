"""The accounted privacy loss: dp-accounting's own, calibrated noise, budgets."""

from __future__ import annotations

import math

import dp_accounting as dp
import pytest
from dp_accounting import pld, rdp

from fedfa.errors import ConfigError
from fedfa.protection.accounting import Mechanism, Sampling, budget, calibrated
from fedfa.protection.settings import PrivacyConfig

SETTINGS: list[tuple[Sampling, int, int, float, int, float]] = [
    ("poisson", 1000, 40, 0.6, 50, 1e-5), ("poisson", 1000, 30, 1.0, 200, 1e-5),
    ("poisson", 1000, 50, 1.0, 100, 1e-6), ("poisson", 1000, 100, 1.5, 100, 1e-5),
    ("poisson", 5000, 100, 0.8, 500, 1e-5), ("poisson", 200, 100, 4.0, 30, 1e-5),
    ("poisson", 10000, 100, 0.7, 1000, 1e-6), ("poisson", 1000, 200, 3.0, 10, 1e-4),
    ("poisson", 1000, 30, 2.0, 1, 1e-5), ("everybody", 100, 100, 1.0, 1, 1e-5),
    ("everybody", 100, 100, 5.0, 10, 1e-5), ("everybody", 20, 20, 10.0, 30, 1e-6),
    ("everybody", 10, 10, 3.0, 1, 1e-3), ("everybody", 50, 50, 30.0, 200, 1e-5),
    ("fixed size", 1000, 10, 2.0, 50, 1e-5), ("fixed size", 1000, 50, 2.0, 100, 1e-5),
    ("fixed size", 100, 10, 4.0, 200, 1e-5), ("fixed size", 100, 50, 20.0, 30, 1e-4),
    ("fixed size", 10000, 100, 1.6, 500, 1e-6), ("fixed size", 500, 5, 3.0, 1, 1e-5),
]  # fmt: skip


QUICK = [one for one in SETTINGS if one[0] != "fixed size"] + SETTINGS[-2:]
CHOSEN = [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in SETTINGS]


@pytest.mark.parametrize(("sampling", "clients", "cohort", "noise", "rounds", "delta"), CHOSEN)
def test_epsilon_is_that_of_dp_accounting(
    sampling: Sampling, clients: int, cohort: int, noise: float, rounds: int, delta: float
) -> None:
    mechanism = Mechanism(noise, sampling, clients, cohort, delta)
    if sampling == "fixed size":
        # Replacing a client moves the sum by up to twice the clip.
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(noise / 2))
        accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        accountant.compose(event, rounds)
        assert mechanism.epsilon(rounds) == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
        return
    # What empty cohorts cost of δ: at most a hundredth, or the config is refused.
    left = delta - rounds * (1 - cohort / clients) ** clients if sampling == "poisson" else delta
    assert left >= 0.99 * delta
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    accountant.compose(dp.PoissonSampledDpEvent(cohort / clients, dp.GaussianDpEvent(noise)), rounds)
    assert mechanism.epsilon(rounds) == pytest.approx(accountant.get_epsilon(left), rel=1e-9)
    assert mechanism.epsilon(rounds) <= mechanism.rdp_epsilon(rounds)


def test_the_grid_of_the_distribution_is_fine_enough() -> None:
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)  # ten times finer
    accountant.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.5)), 100)
    found = Mechanism(1.5, "poisson", 1000, 100, 1e-5).epsilon(100)
    assert 0 <= found - accountant.get_epsilon(1e-5) < 2e-4  # an upper bound, hardly above


@pytest.mark.parametrize("sampling", ["poisson", "everybody", pytest.param("fixed size", marks=pytest.mark.slow)])
def test_calibrated_noise_spends_the_budget_and_no_more(sampling: Sampling) -> None:
    cohort = 1000 if sampling == "everybody" else 50
    found = calibrated(Mechanism(1.0, sampling, 1000, cohort, 1e-6), 2.0, 40)
    assert found.epsilon(40) <= 2.0
    assert found.epsilon(40) == pytest.approx(2.0, rel=1.1e-3)
    assert 0 < found.epsilon(1) < found.epsilon(40)
    assert found.epsilon(0) == 0


def test_a_budget_with_given_noise_ends_where_it_is_spent() -> None:
    given = PrivacyConfig(epsilon=3.0, noise=8.0, delta=1e-5)
    found = budget(given, poisson=False, clients=30, cohort=30, rounds=40)
    allowed = [rounds for rounds in range(1, 41) if found.allows(rounds)]
    assert allowed == list(range(1, len(allowed) + 1))
    assert 1 < len(allowed) < 40
    assert found.mechanism.epsilon(len(allowed)) <= 3.0 < found.mechanism.epsilon(len(allowed) + 1)
    only_noise = budget(PrivacyConfig(noise=8.0), poisson=False, clients=30, cohort=30, rounds=100)
    assert only_noise.allows(10_000)
    assert math.isinf(only_noise.epsilon)
    assert only_noise.mechanism.delta == 1e-5  # less than 30^−1.1


def test_noise_that_does_not_allow_a_single_round_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a single round spends .* more than privacy.epsilon = 0.5"):
        budget(PrivacyConfig(epsilon=0.5, noise=1.0), poisson=False, clients=30, cohort=30, rounds=3)


def test_poisson_cohorts_that_could_be_empty_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"without any client.*about 22 are needed"):
        budget(PrivacyConfig(epsilon=3.0), poisson=True, clients=100, cohort=5, rounds=200)
