"""When devices are available: a two-state Markov chain with a daily cycle.

A device is available or not. At some moments it *decides anew*: with the probability p(t) of that time of its day it is
available from then on, else not, independently of what it was. With decisions at rate r this is the two-state Markov
chain with rates r · p(t) from off to on and r · (1 − p(t)) from on to off. The probability follows the day::

    p(t) = share · (1 + a cos(2π (t − peak) / 86400)),      a = (swing − 1) / (swing + 1),

so that it is ``swing`` times as large at the peak as half a day later. Bonawitz et al., *Towards Federated Learning at
Scale*, MLSys 2019, report a swing of about 4 between night and day.

Time is cut into slots, shifted by a different amount for each device, and a device decides at the beginning of a slot
or not. Whether and what it decides is a hash of seed, device and slot. So the state of any device at any time is found
without a history: memory is one number per device (its peak), and looking at a few devices costs a few hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedfa.learning.random import stream

DAY = 86_400.0
SLOT = 60.0
"""Seconds between moments at which a device may change its state."""

_AT_ONCE = 512
"""Decisions that are examined together."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DailyAvailability:
    """Which devices are available at which time.

    Args:
        peak: Second of the day at which each device is most often available.
        share: Mean share of the time.
        session: Mean length of a session that lies where p(t) = share, in seconds.
        seed: Of the hash.
        swing: Ratio between the highest and the lowest p(t).

    Example:
        >>> fleet = DailyAvailability(np.zeros(10_000), share=0.5, session=3600.0, seed=1)
        >>> [round(float(fleet.available(np.arange(10_000), at * 3600.0).mean()), 1) for at in (1, 13)]
        [0.8, 0.2]
    """

    peak: Floats
    share: float
    session: float
    seed: int
    swing: float = 4.0

    @property
    def _decides(self) -> float:
        """Probability of a decision in a slot: a session ends with probability decides · (1 − share) per slot."""
        return min(1.0, SLOT / (self.session * (1 - self.share)))

    def probability(self, clients: Ints, time: Floats | float) -> Floats:
        """p(t) of these devices."""
        amplitude = (self.swing - 1) / (self.swing + 1)
        angle = 2 * np.pi * (time - self.peak[clients]) / DAY
        return np.asarray(self.share * (1 + amplitude * np.cos(angle)))

    def available(self, clients: Ints, time: float) -> NDArray[np.bool_]:
        """Whether these devices are available at this time."""
        clients = np.asarray(clients, dtype=np.int64)
        shift = self._shift(clients)
        slot = np.floor((time + shift) / SLOT).astype(np.int64)
        state = np.zeros(len(clients), dtype=bool)
        open_ = np.arange(len(clients))  # those whose last decision is not found yet
        # A decision lies 1/decides slots back on average; the bound is passed with a probability below e^-60. For few
        # devices many slots are examined together: operations on small arrays cost more than their elements.
        begin, bound = 0, 1 + int(60 / self._decides)
        while begin < bound and len(open_):
            depth = max(1, _AT_ONCE // len(open_))
            slots = slot[open_, None] - np.arange(begin, begin + depth)
            decided, on = self._decision(clients[open_, None], slots, shift[open_, None])
            found = decided.any(1)
            state[open_[found]] = on[found, decided[found].argmax(1)]
            open_ = open_[~found]
            begin += depth
        return state

    def leaves(self, client: int, start: float, end: float) -> float | None:
        """When a device that is available at ``start`` first becomes unavailable, if that is before ``end``."""
        who = np.asarray([client], dtype=np.int64)
        shift = float(self._shift(who)[0])
        first, last = int((start + shift) // SLOT) + 1, int((end + shift) // SLOT)
        for begin in range(first, last + 1, 4096):  # in pieces: a slow device may take days
            slots = np.arange(begin, min(begin + 4096, last + 1), dtype=np.int64)
            decided, on = self._decision(np.repeat(who, len(slots)), slots, np.full(len(slots), shift))
            if len(off := np.flatnonzero(decided & ~on)):
                return float(slots[off[0]] * SLOT - shift)
        return None

    def _decision(self, clients: Ints, slots: Ints, shift: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether these devices decide in these slots, and whether they would then be available."""
        bits = _hash(clients, slots, self._key)
        decided = (bits >> np.uint64(32)).astype(np.float64) < self._decides * 2**32
        drawn = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
        return decided, drawn < self.probability(clients, slots * SLOT - shift)

    def _shift(self, clients: Ints) -> Floats:
        return (_hash(clients, np.zeros_like(clients), ~self._key) >> np.uint64(11)).astype(np.float64) / 2**53 * SLOT

    @cached_property
    def _key(self) -> np.uint64:
        return np.uint64(stream(self.seed, "availability").integers(2**63))


def _hash(clients: Ints, slots: Ints, key: np.uint64) -> NDArray[np.uint64]:
    """64 bits per client and slot: two rounds of the finaliser of SplitMix64."""
    mixed = _mix(clients.astype(np.uint64) + key)
    return _mix(mixed ^ slots.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
