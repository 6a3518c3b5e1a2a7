"""Selections that go by what is known of clients: closed forms, and the same bits however a run is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data import DataSet
from fedfa.errors import ConfigError
from fedfa.experiment.config import CohortConfig
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.fleet.informed import KnownClients, oort, power_of_choice
from fedfa.fleet.selection import Selector
from fedfa.learning.cohort import INFORMED, Selection
from fedfa.learning.round import ServerState
from tests.experiment.run_toys import STATEFUL, assert_same_run, equal_tensors
from tests.fleet.test_clock import DRAWN, POLICIES, config, trained

SIZES = np.asarray([10, 20, 30, 40, 80])


def known(losses: dict[int, float], seconds: dict[int, float] | None = None, round: int = 1) -> KnownClients:
    return KnownClients().after(round, losses, seconds or {})


# -- closed forms -----------------------------------------------------------------------------------------------------
def test_utility_without_a_clock() -> None:
    """Sizes 10, 20, 30 with losses 3, 2, 1 have U = 30, 40, 30; the 95th percentile is 30 + 0.9 · 10 = 39.

    So the first terms are 0, 1, 0; in round 8 a last contribution in round 2 adds √(0.1 ln 8 / 2).
    """
    found = known({0: 3.0, 1: 2.0, 2: 1.0}, round=2).utility(SIZES, round=8)
    assert found == pytest.approx(np.asarray([0.0, 1.0, 0.0]) + np.sqrt(0.1 * np.log(8) / 2))


def test_slow_clients_lose_utility() -> None:
    """Equal gains (U = 40) count 1, and in round 1 nothing is added. Times 10, 20, 40: the median is T = 20, so only
    the last one is slower, by (20 / 40)² = ¼."""
    found = known({0: 4.0, 1: 2.0, 3: 1.0}, {0: 10.0, 1: 20.0, 3: 40.0}).utility(SIZES, round=1)
    assert found.tolist() == [1.0, 1.0, 0.25]


def test_the_longer_ago_the_more_is_added() -> None:
    """Clients 0 and 1 contributed in rounds 1 and 4: √(0.1 ln 9 / 1) is twice √(0.1 ln 9 / 4)."""
    memory = known({0: 4.0}).after(4, {1: 2.0}, {})
    first, second = memory.utility(SIZES, 9) - 1
    assert first == pytest.approx(2 * second)
    assert memory.last.tolist() == [1, 4]


def test_exploration_and_exploitation() -> None:
    """Four of five places. In round 1 ε = 0.9: 0.9 · 4 = 3.6, so four untried ones; in round 100 ε = 0.2, so one.

    The three others are the known ones with the highest gains: 40 and more is 95 % of the third highest, 40.
    """
    asked: list[int] = []

    def untried(count: int) -> list[int]:
        asked.append(count)
        return list(range(100, 100 + count))

    memory = known({0: 0.1, 1: 2.0, 2: 2.0, 3: 1.0, 4: 0.1})  # gains 1, 40, 60, 40, 8
    rng = np.random.default_rng(1)
    assert oort(4, memory, untried, SIZES, 1, rng) == [100, 101, 102, 103]
    chosen = oort(4, memory, untried, SIZES, 100, rng)
    assert chosen[0] == 100
    assert sorted(chosen[1:]) == [1, 2, 3]
    assert asked == [4, 1]


def test_exploitation_draws_in_proportion_to_utility() -> None:
    """One place, utilities 1 and 0.96 in the pool (at least 0.95), 0.5 not: shares 1/1.96 and 0.96/1.96 of 4,000."""
    sizes = np.asarray([1, 1, 1, 1])
    memory = KnownClients(np.arange(4), np.asarray([1.0, 0.96, 0.5, 0.0]), np.ones(4, dtype=np.int64), np.zeros(4))
    counts = np.zeros(4)
    memory = replace(memory, loss=np.asarray([1.0, 0.96, 0.5, 0.0]))
    utility = memory.utility(sizes, 1)  # clipped at the 95th percentile 0.96 + 0.85 · 0.04
    for seed in range(4000):
        (chosen,) = oort(1, memory, lambda count: [], sizes, 1, np.random.default_rng(seed))
        counts[chosen] += 1
    assert counts[2:].sum() == 0
    share = utility[0] / (utility[0] + utility[1])
    assert abs(counts[0] - 4000 * share) < 4 * np.sqrt(4000 * share * (1 - share))


def test_who_never_contributed_comes_first_then_the_highest_loss() -> None:
    assert power_of_choice([3, 1, 4, 0, 2], 3, known({0: 1.0, 1: 5.0, 2: 9.0, 3: 2.0})) == [4, 2, 1]
    assert power_of_choice([3, 1], 1, known({1: 2.0, 3: 2.0})) == [3]


def test_candidates_are_drawn_in_proportion_to_samples() -> None:
    """One client of one candidate: the choice is the draw, so client 4 (80 of 180 samples) gets 80/180 of 3,000."""
    selector = Selector(SIZES, np.arange(5), "power-of-choice", 1, candidates=1.0)
    counts = np.zeros(5)
    for number in range(3000):
        counts[selector.select(1, 0.0, number, set())] += 1
    shares = SIZES / SIZES.sum()
    assert (np.abs(counts - 3000 * shares) < 4 * np.sqrt(3000 * shares * (1 - shares))).all()


def test_two_candidates_give_the_one_with_the_higher_loss() -> None:
    selector = Selector(np.full(5, 3), np.arange(5), "power-of-choice", 1, known=known({c: float(c) for c in range(5)}))
    counts = np.zeros(5)
    for number in range(2000):
        counts[selector.select(1, 0.0, number, set())] += 1
    # Client c wins against the c lower ones, in c of the 10 pairs.
    assert np.abs(counts / 2000 - np.arange(5) / 10).max() < 4 * np.sqrt(0.24 / 2000)


@pytest.mark.parametrize("selection", INFORMED)
def test_busy_clients_are_not_drawn_and_all_others_can_be(selection: Selection) -> None:
    selector = Selector(SIZES, np.arange(5), selection, 1, known=known({0: 1.0, 3: 2.0}))
    for number in range(20):
        assert sorted(selector.select(3, 0.0, number, {1, 3})) == [0, 2, 4]
        assert sorted(selector.select(5, 0.0, number, {1})) == [0, 2, 3, 4]


def test_a_visit_that_was_lost_makes_a_client_known() -> None:
    memory = known({1: 2.0}, {1: 5.0}).after(3, {}, {1: 60.0, 2: 60.0})
    assert (memory.loss.tolist(), memory.last.tolist()) == ([2.0, 0.0], [3, 3])
    assert memory.seconds.tolist() == [60.0, 60.0]


def test_the_memory_survives_a_checkpoint() -> None:
    memory = known({1: 2.0}, {1: 5.0, 4: 1.0})
    again = KnownClients.of(
        ServerState.from_tensors(memory.added_to(ServerState(1, {"w": torch.ones(1)}, {})).to_tensors())
    )
    for name, value in vars(memory).items():
        assert vars(again)[name].tolist() == value.tolist()


# -- trainings --------------------------------------------------------------------------------------------------------
def cohort(selection: str) -> dict[str, Any]:
    return {"cohort": {"clients": 3, "selection": selection}}


@pytest.mark.parametrize("selection", INFORMED)
@pytest.mark.parametrize("policy", [None, "drop", "fedbuff"])
def test_workers_change_no_bit(blobs: DataSet, selection: str, policy: str | None) -> None:
    fleet = None if policy is None else {**DRAWN, **POLICIES[policy]}
    one = trained(blobs, "fedfa", fleet, **cohort(selection), rounds=5)
    two = trained(blobs, "fedfa", fleet, **cohort(selection), rounds=5, engine={"workers": 2, "execution": "each"})
    assert [record.cohort for record in one.records] == [record.cohort for record in two.records]
    assert equal_tensors(one.state.to_tensors(), two.state.to_tensors())
    uniform = trained(blobs, "fedfa", fleet, cohort={"clients": 3}, rounds=5)
    assert [record.cohort for record in one.records] != [record.cohort for record in uniform.records]
    assert len(KnownClients.of(one.state).clients) >= 3


def test_power_of_choice_trains_everyone_before_anyone_twice(blobs: DataSet) -> None:
    """Six clients are candidates each time (2 · 3): unknown ones first, so two rounds reach all six."""
    records = trained(blobs, **cohort("power-of-choice"), rounds=2).records
    assert sorted(records[0].cohort + records[1].cohort) == list(range(6))


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("selection", INFORMED)
@pytest.mark.parametrize("policy", [None, "fedbuff"])
def test_a_run_that_was_killed_selects_the_same_clients(
    blobs: DataSet, selection: str, policy: str | None, tmp_path: Path
) -> None:
    fleet = None if policy is None else {**DRAWN, **POLICIES[policy]}
    planned = config(STATEFUL, fleet, rounds=6, checkpoint={"every": 2}, **cohort(selection))
    run(planned, tmp_path / "whole", data=blobs)

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == 5:
            raise _KilledError

    with pytest.raises(_KilledError):
        run(planned, tmp_path / "killed", data=blobs, watch=kill)
    run(planned, tmp_path / "killed", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_what_does_not_fit_is_refused(blobs: DataSet) -> None:
    with pytest.raises(ConfigError, match=r"cohort\.candidates belongs to"):
        config(cohort={"clients": 3, "candidates": 2.0})
    assert CohortConfig(selection="power-of-choice", candidates=3).candidates == 3
    for private, reason in (({"noise": 1.0}, "is not accounted"), ({"masks": True}, "losses of single clients")):
        with pytest.raises(ConfigError, match=reason):
            Experiment.from_config(config(**cohort("oort"), privacy=private), data=blobs)
