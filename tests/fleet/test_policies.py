"""Timelines of five clients under every policy, derived by hand.

The five clients of all these tests have links that take one second to download (100 bytes at 100 B/s) and one second to
upload (50 bytes at 50 B/s), and train 10 samples a second. They hold 10, 20, 30, 40 and 80 samples and make one epoch
in batches of 10, so that they train for 1, 2, 3, 4 and 8 seconds. A visit that starts at s therefore ends at

    client      0       1       2       3       4
    end       s + 3   s + 4   s + 5   s + 6   s + 10

The server always draws the clients with the lowest numbers that are not busy.
"""

from __future__ import annotations

from collections.abc import Set
from typing import get_args

import numpy as np
import pytest

from fedfa.errors import ConfigError, RunError
from fedfa.fleet.availability import DailyAvailability
from fedfa.fleet.config import FleetConfig
from fedfa.fleet.devices import Fleet
from fedfa.fleet.policies import Moment, asynchronous, synchronous
from fedfa.fleet.selection import Selector
from fedfa.fleet.visits import Travel, Visit, Window
from fedfa.learning.cohort import INFORMED, Selection, choose_cohort
from fedfa.learning.context import LocalTraining

SIZES = np.asarray([10, 20, 30, 40, 80])
FLEET = Fleet(np.full(5, 10.0), np.full(5, 100.0), np.full(5, 50.0))
TRAVEL = Travel(FLEET, SIZES, LocalTraining(epochs=1, batch_size=10), down=100, up=50)


def lowest(count: int, time: float, number: int, busy: Set[int]) -> list[int]:
    return [client for client in range(5) if client not in busy][:count]


def at(time: float, version: int = 0, running: list[Visit] | None = None, draws: int = 0) -> Moment:
    return Moment(time, version, running or [], draws, lowest, TRAVEL.visit)


def after(window: Window, version: int) -> Moment:
    return at(window.end, version, window.running, window.draws)


def ends(visits: list[Visit]) -> list[tuple[int, float]]:
    return [(visit.client, visit.end) for visit in visits]


def policy(**options: object) -> FleetConfig:
    return FleetConfig(devices="equal", **options)


def test_wait_for_all() -> None:
    """All five start at 0 and end at 3, 4, 5, 6 and 10; the round ends at 10.

    They worked 3 + 4 + 5 + 6 + 10 = 28 of 5 · 10 seconds.
    """
    window = synchronous(at(0.0), policy(), 5)
    assert ends(window.arrived) == [(0, 3.0), (1, 4.0), (2, 5.0), (3, 6.0), (4, 10.0)]
    assert window.end == 10.0
    assert window.utilisation() == pytest.approx(28 / 50)
    assert window.timeline()[4] == [4, 0, 0.0, 1.0, 9.0, 10.0, "counted"]


def test_a_deadline_cuts_off_who_is_late() -> None:
    """Deadline 5.5: clients 0, 1, 2 arrive at 3, 4, 5. Client 3 is uploading (trained at 5), client 4 is training.

    Useful are 3 + 4 + 5 = 12 of 5 · 5.5 seconds.
    """
    window = synchronous(at(0.0), policy(policy="deadline", deadline=5.5), 5)
    assert ends(window.arrived) == [(0, 3.0), (1, 4.0), (2, 5.0)]
    assert window.end == 5.5
    assert window.running == []
    assert [row for row in window.timeline() if row[-1] == "late"] == [
        [3, 0, 0.0, 1.0, 5.0, 5.5, "late"],
        [4, 0, 0.0, 1.0, 5.5, 5.5, "late"],
    ]
    assert window.utilisation() == pytest.approx(12 / 27.5)


def test_a_deadline_that_nobody_misses_does_not_prolong_the_round() -> None:
    assert synchronous(at(0.0), policy(policy="deadline", deadline=60.0), 4).end == 6.0


def test_late_contributions_count_in_the_round_in_which_they_arrive() -> None:
    """Deadline 5.5, as above; clients 3 and 4 go on and arrive at 6 and 10.

    The next round starts at 5.5 with the idle clients 0, 1, 2, which end at 8.5, 9.5 and 10.5. It ends at 10.5, and the
    contributions of 3 and 4, one version old, count in it.
    """
    config = policy(policy="deadline", deadline=5.5, late="next")
    first = synchronous(at(0.0), config, 5)
    assert ends(first.running) == [(3, 6.0), (4, 10.0)]
    assert first.utilisation() == pytest.approx(12 / 16.5)  # 0, 1, 2 worked 12 of 3 · 5.5 seconds; 3 and 4 go on
    second = synchronous(after(first, 1), config, 3)
    assert ends(second.arrived) == [(3, 6.0), (4, 10.0), (0, 8.5), (1, 9.5), (2, 10.5)]
    assert [visit.version for visit in second.arrived] == [0, 0, 1, 1, 1]
    assert second.end == 10.5
    assert second.running == []


def test_partial_work_makes_as_many_steps_as_fit() -> None:
    """Deadline 5.5, of which transfers take 2: 3.5 seconds of training, 35 samples, 3 batches of 10.

    Clients 3 and 4 (4 and 8 batches) make 3 steps and arrive at 1 + 3 + 1 = 5, client 2 has exactly 3 batches. So all
    five arrive by 5, where the round ends.
    """
    window = synchronous(at(0.0), policy(policy="deadline", deadline=5.5, late="partial"), 5)
    assert ends(window.arrived) == [(0, 3.0), (1, 4.0), (2, 5.0), (3, 5.0), (4, 5.0)]
    assert [visit.steps for visit in window.arrived] == [None, None, None, 3, 3]
    assert window.end == 5.0


def test_a_client_that_cannot_make_a_single_step_is_cut_off() -> None:
    """Deadline 2.9: 0.9 seconds of training, 9 samples, less than a batch. Nobody arrives."""
    window = synchronous(at(0.0), policy(policy="deadline", deadline=2.9, late="partial"), 5)
    assert window.arrived == []
    assert window.end == 2.9
    assert window.utilisation() == 0


def test_over_selection_counts_the_first() -> None:
    """Three wanted, 1.5 · 3 = 4.5, so five drawn; the third arrives at 5, and 3 and 4 are cut off there."""
    window = synchronous(at(0.0), policy(over_selection=1.5), 3)
    assert len(window.started) == 5
    assert ends(window.arrived) == [(0, 3.0), (1, 4.0), (2, 5.0)]
    assert window.end == 5.0
    assert ends(window.lost["late"]) == [(3, 5.0), (4, 5.0)]


def test_over_selection_of_1_3_draws_13_for_10() -> None:
    fleet = Fleet(np.full(20, 1.0), np.full(20, 1.0), np.full(20, 1.0))
    travel = Travel(fleet, np.full(20, 5), LocalTraining(), 1, 1)
    drawn: list[int] = []

    def select(count: int, time: float, number: int, busy: Set[int]) -> list[int]:
        drawn.append(count)
        return list(range(count))

    window = synchronous(Moment(0.0, 0, [], 0, select, travel.visit), policy(over_selection=1.3), 10)
    assert drawn == [13]
    assert [visit.client for visit in window.arrived] == list(range(10))  # all at one moment: the first drawn


def test_fedbuff() -> None:
    """Three train at a time, the buffer holds two.

    ====  ==========================================================================================
      0   0, 1, 2 start with version 0; they end at 3, 4, 5
      3   0 arrives; 3 starts with version 0 (0 has trained this version), ends at 9
      4   1 arrives: first server step, version 1; 0 starts with it, ends at 7
      5   2 arrives, one version old; 1 starts with version 1, ends at 9
      7   0 arrives: second server step, version 2; 0 starts again, ends at 10
      9   3 and 1 arrive, in the order of their starts: two versions and one version old; third server step
    ====  ==========================================================================================
    """
    first = asynchronous(at(0.0), buffer=2, concurrency=3)
    assert (first.end, ends(first.arrived), ends(first.running)) == (4.0, [(0, 3.0), (1, 4.0)], [(2, 5.0), (3, 9.0)])
    second = asynchronous(after(first, 1), buffer=2, concurrency=3)
    assert (second.end, ends(second.arrived)) == (7.0, [(2, 5.0), (0, 7.0)])
    assert [1 - visit.version for visit in second.arrived] == [1, 0]
    assert ends(second.running) == [(3, 9.0), (1, 9.0)]
    third = asynchronous(after(second, 2), buffer=2, concurrency=3)
    assert (third.end, ends(third.arrived)) == (9.0, [(3, 9.0), (1, 9.0)])
    assert [2 - visit.version for visit in third.arrived] == [2, 1]
    assert ends(third.running) == [(0, 10.0)]
    assert first.utilisation() == second.utilisation() == third.utilisation() == 1


def test_fedasync() -> None:
    """Two train at a time, the server steps after each.

    0 and 1 start at 0. At 3 client 0 arrives: version 1, with which it starts again and ends at 6. At 4 client 1
    arrives, one version old: version 2, with which it starts and ends at 8. At 6 client 0 arrives, one version old.
    """
    moment, found = at(0.0), []
    for version in range(3):
        window = asynchronous(moment, buffer=1, concurrency=2)
        (visit,) = window.arrived
        found.append((window.end, visit.client, version - visit.version))
        moment = after(window, version + 1)
    assert found == [(3.0, 0, 0), (4.0, 1, 1), (6.0, 0, 1)]


def test_with_equal_devices_and_a_full_buffer_asynchronous_rounds_are_synchronous_ones() -> None:
    travel = Travel(FLEET, np.full(5, 10), LocalTraining(epochs=1, batch_size=10), 100, 50)
    moment = Moment(0.0, 0, [], 0, lowest, travel.visit)
    for version in range(3):
        window = asynchronous(moment, buffer=4, concurrency=4)
        assert [visit.client for visit in window.started] == [visit.client for visit in window.arrived] == [0, 1, 2, 3]
        assert (window.end, window.draws, window.running) == (3.0 * (version + 1), version + 1, [])
        moment = Moment(window.end, version + 1, window.running, window.draws, lowest, travel.visit)


# -- availability -----------------------------------------------------------------------------------------------------
class FromTo(DailyAvailability):
    """Available from 0 to 4.5 and from 100 on."""

    def available(self, clients: np.ndarray, time: float) -> np.ndarray:
        return np.full(len(clients), time < 4.5 or time >= 100)

    def leaves(self, client: int, start: float, end: float) -> float | None:
        return 4.5 if start < 4.5 <= end else None


COMES_AND_GOES = FromTo(np.zeros(5), 0.5, 3600.0, 1)
LEAVING = Travel(Fleet(FLEET.speed, FLEET.down, FLEET.up, COMES_AND_GOES), SIZES, TRAVEL.local, 100, 50)


def test_devices_that_leave_are_not_waited_for() -> None:
    """All leave at 4.5: clients 0 and 1 have arrived (3, 4), the others never will, so the round ends at 4.5.

    Useful are 7 of 4 · 4.5 (0 and 1 wait for the end) … in total 3 + 4 of 5 · 4.5 seconds.
    """
    window = synchronous(Moment(0.0, 0, [], 0, lowest, LEAVING.visit), policy(), 5)
    assert ends(window.arrived) == [(0, 3.0), (1, 4.0)]
    assert ends(window.lost["offline"]) == [(2, 4.5), (3, 4.5), (4, 4.5)]
    assert window.end == 4.5
    assert window.utilisation() == pytest.approx(7 / 22.5)


def test_the_server_waits_until_enough_clients_are_available() -> None:
    """From 4.5 nobody is there; the server looks every minute, at 65 and at 125, when they are back."""
    selector = Selector(SIZES, np.arange(5), "uniform", 1, COMES_AND_GOES)
    window = synchronous(Moment(5.0, 0, [], 0, selector.select, LEAVING.visit), policy(), 2)
    assert [visit.start for visit in window.started] == [125.0, 125.0]


def test_nobody_for_a_week_is_an_error() -> None:
    def nobody(count: int, time: float, number: int, busy: Set[int]) -> list[int]:
        return []

    with pytest.raises(RunError, match="too few clients were available"):
        synchronous(Moment(0.0, 0, [], 0, nobody, TRAVEL.visit), policy(), 2)
    with pytest.raises(RunError, match="too few clients were available"):
        asynchronous(Moment(0.0, 0, [], 0, nobody, TRAVEL.visit), 2, 2)


def test_without_refusals_the_draw_is_that_of_a_training_without_a_clock() -> None:
    sizes = np.full(50, 3)
    with pytest.raises(ConfigError, match="draws cohorts of random size"):
        Selector(sizes, np.arange(50), "poisson", 7)
    for selection in set(get_args(Selection)) - {"poisson", *INFORMED}:
        selector = Selector(sizes, np.arange(50), selection, 7)
        assert selector.select(8, 0.0, 3, set()) == choose_cohort(sizes, 8, selection, 7, 3)


@pytest.mark.parametrize("selection", ["uniform", "size"])
def test_the_selection_among_available_clients_is_even(selection: Selection) -> None:
    """Odd clients are busy: each of the 25 others is drawn with probability 5/25 in each of 2,000 draws."""
    selector, busy = Selector(np.full(50, 3), np.arange(50), selection, 7), set(range(1, 50, 2))
    counts = np.zeros(50)
    for number in range(2000):
        chosen = selector.select(5, 0.0, number, busy)
        assert len(set(chosen)) == 5
        counts[chosen] += 1
    assert counts[1::2].sum() == 0
    assert np.abs(counts[::2] - 400).max() < 4 * np.sqrt(2000 * 0.2 * 0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "deadline"}, "belong together"),
        ({"deadline": 3.0}, "belong together"),
        ({"late": "next"}, 'belongs to fleet.policy = "deadline"'),
        ({"buffer": 3}, 'belongs to fleet.policy = "fedbuff"'),
        ({"policy": "fedbuff", "over_selection": 1.3}, "over_selection has no meaning"),
        ({"concurrency": 3}, "concurrency has no meaning"),
    ],
)
def test_options_of_another_policy_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(**options)
