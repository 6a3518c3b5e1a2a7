"""The two-state chain with a daily cycle: its probabilities, its sessions, its two views of time agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfa.fleet.availability import DAY, SLOT, DailyAvailability

CLIENTS = np.arange(20_000)


def daily(
    share: float = 0.3, session: float = 3600.0, swing: float = 4.0, clients: int = len(CLIENTS)
) -> DailyAvailability:
    return DailyAvailability(np.zeros(clients), share, session, seed=3, swing=swing)


def lagged_probability(model: DailyAvailability, hour: float) -> float:
    """Σ_k q (1 − q)^k p(t − k slots): the state at t is the last decision, which lies k slots back with that weight."""
    q = SLOT / (model.session * (1 - model.share))
    back = np.arange(int(40 / q))
    times = np.asarray(hour * 3600 - (back + 0.5) * SLOT, dtype=np.float64)
    weights = q * (1 - q) ** back
    return float((weights * model.probability(np.zeros_like(back), times)).sum())


@pytest.mark.parametrize("hour", [0, 5, 12, 30])
def test_the_share_of_available_devices_follows_the_day(hour: int) -> None:
    """20,000 devices: the deviation of the mean is at most 0.0035; four of them."""
    model = daily()
    found = float(model.available(CLIENTS, hour * 3600.0).mean())
    assert abs(found - lagged_probability(model, hour)) < 0.014


def test_without_swing_the_share_is_constant_and_sessions_have_the_mean_length() -> None:
    """With p constant a session ends in each slot with probability q (1 − p) = slot/session."""
    model = daily(share=0.5, session=1800.0, swing=1.0)
    assert abs(float(model.available(CLIENTS, 1000.0).mean()) - 0.5) < 0.014
    lengths = []
    for client in np.flatnonzero(model.available(CLIENTS, 50_000.0))[:1500]:
        left = model.leaves(int(client), 50_000.0, 50_000.0 + 30 * DAY)
        assert left is not None
        lengths.append(left - 50_000.0)
    # The rest of a geometric session is again geometric, up to half a slot at the beginning: deviation 1800/√1500.
    assert abs(np.mean(lengths) - (1800 - SLOT / 2)) < 4 * 1800 / np.sqrt(1500)


@settings(max_examples=12, deadline=None)
@given(client=st.integers(0, 999), start=st.floats(0, 5 * DAY), length=st.floats(60, 20_000))
def test_leaving_is_the_first_moment_at_which_the_device_is_not_available(
    client: int, start: float, length: float
) -> None:
    model, who = daily(share=0.5, session=1200.0, clients=1000), np.asarray([client])
    if not model.available(who, start)[0]:
        return
    left = model.leaves(client, start, start + length)
    moments = np.arange(start, start + length if left is None else left, SLOT / 4)
    assert all(model.available(who, float(moment))[0] for moment in moments)
    if left is not None:
        assert start < left <= start + length
        assert not model.available(who, left + 1e-6)[0]


def test_devices_do_not_change_at_the_same_moments() -> None:
    model = daily()
    changes = {round((model.leaves(int(c), 0.0, 10 * DAY) or 0) % SLOT, 3) for c in range(200)}
    assert len(changes) > 150
