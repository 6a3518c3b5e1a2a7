"""The selection of clients that are available and not busy, and selections that go by what is known of clients."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from fedfa.errors import ConfigError
from fedfa.fleet.availability import DailyAvailability, Ints
from fedfa.fleet.informed import KnownClients, oort, power_of_choice
from fedfa.learning.cohort import INFORMED, Selection, choose_cohort
from fedfa.learning.random import stream

_ATTEMPTS = 30
"""Draws among all clients before all are examined."""


@dataclass(frozen=True)
class Selector:
    """Draws clients as the cohort's selection says, without those that are busy or unavailable.

    Where nobody is refused, the draw is that of a training without a clock, bit for bit. Where some are refused, others
    are drawn in their place one by one, so a draw does not look at all of a million clients.

    Args:
        sizes: Samples of each client.
        holders: The clients with samples.
        selection: How the cohort is drawn.
        seed: Of the training.
        availability: When clients are available; None: always.
        candidates: With ``"power-of-choice"``: clients among which to choose, times the clients that are wanted.
        known: What is known of the clients, for selections that go by it.
    """

    sizes: Ints
    holders: Ints
    selection: Selection
    seed: int
    availability: DailyAvailability | None = None
    candidates: float = 2.0
    known: KnownClients = field(default_factory=KnownClients)

    def __post_init__(self) -> None:
        if self.selection == "poisson":
            raise ConfigError(
                'cohort.selection = "poisson" draws cohorts of random size, which a clock does not know; choose '
                "another selection, or leave the keys of fleet out"
            )

    @property
    def informed(self) -> bool:
        """Whether it goes by what is known of the clients."""
        return self.selection in INFORMED

    def select(self, count: int, time: float, number: int, busy: Set[int], round: int | None = None) -> list[int]:
        """At most this many clients: fewer only where there are no more.

        Args:
            count: How many.
            time: The moment.
            number: Of the draw.
            busy: Clients that cannot be drawn.
            round: Counted from 0; left out, the number of the draw.
        """
        if self.selection == "power-of-choice":
            drawn = self._drawn(math.ceil(count * self.candidates - 1e-9), time, number, busy, "size")
            return power_of_choice(drawn, count, self.known)
        if self.selection == "oort":
            tried = self.known.clients.tolist()
            here = self.known.only(self._acceptable(tried, time, busy))

            def untried(wanted: int) -> list[int]:
                return self._drawn(wanted, time, number, busy | set(tried), "uniform")

            rng = stream(self.seed, "oort", number)
            return oort(count, here, untried, self.sizes, (number if round is None else round) + 1, rng)
        return self._drawn(count, time, number, busy, self.selection)

    def _drawn(self, count: int, time: float, number: int, busy: Set[int], selection: Selection) -> list[int]:
        """Clients drawn without regard to what is known of them."""
        first = choose_cohort(self.sizes, min(count, len(self.holders)), selection, self.seed, number, self.holders)
        chosen = self._acceptable(first, time, busy)
        if len(chosen) == count:
            return chosen
        rng = stream(self.seed, "cohort again", number)
        if selection != "size":
            for _ in range(_ATTEMPTS):
                drawn = self.holders[rng.integers(len(self.holders), size=2 * (count - len(chosen)) + 8)].tolist()
                chosen += self._acceptable(list(dict.fromkeys(drawn)), time, busy | set(chosen))[: count - len(chosen)]
                if len(chosen) == count:
                    return chosen
        rest = np.asarray(self._acceptable(self.holders.tolist(), time, busy | set(chosen)), dtype=np.int64)
        missing = min(count - len(chosen), len(rest))
        if not missing:
            return chosen
        weights = self.sizes[rest] / self.sizes[rest].sum() if selection == "size" else None
        return chosen + [int(client) for client in rng.choice(rest, missing, replace=False, p=weights)]

    def _acceptable(self, clients: list[int], time: float, busy: Set[int]) -> list[int]:
        free = [client for client in clients if client not in busy]
        if self.availability is None or not free:
            return free
        available = self.availability.available(np.asarray(free, dtype=np.int64), time)
        return [client for client, here in zip(free, available.tolist(), strict=True) if here]
