"""The selection of clients that are available and not busy."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from fedfa.errors import ConfigError
from fedfa.fleet.availability import DailyAvailability, Ints
from fedfa.learning.cohort import Selection, choose_cohort
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
    """

    sizes: Ints
    holders: Ints
    selection: Selection
    seed: int
    availability: DailyAvailability | None = None

    def __post_init__(self) -> None:
        if self.selection == "poisson":
            raise ConfigError(
                'cohort.selection = "poisson" draws cohorts of random size, which a clock does not know; choose '
                "another selection, or leave the keys of fleet out"
            )

    def select(self, count: int, time: float, number: int, busy: Set[int]) -> list[int]:
        """At most this many clients: fewer only where there are no more.

        Args:
            count: How many.
            time: The moment.
            number: Of the draw.
            busy: Clients that cannot be drawn.
        """
        first = choose_cohort(
            self.sizes, min(count, len(self.holders)), self.selection, self.seed, number, self.holders
        )
        chosen = self._acceptable(first, time, busy)
        if len(chosen) == count:
            return chosen
        rng = stream(self.seed, "cohort again", number)
        if self.selection != "size":
            for _ in range(_ATTEMPTS):
                drawn = self.holders[rng.integers(len(self.holders), size=2 * (count - len(chosen)) + 8)].tolist()
                chosen += self._acceptable(list(dict.fromkeys(drawn)), time, busy | set(chosen))[: count - len(chosen)]
                if len(chosen) == count:
                    return chosen
        rest = np.asarray(self._acceptable(self.holders.tolist(), time, busy | set(chosen)), dtype=np.int64)
        missing = min(count - len(chosen), len(rest))
        if not missing:
            return chosen
        weights = self.sizes[rest] / self.sizes[rest].sum() if self.selection == "size" else None
        return chosen + [int(client) for client in rng.choice(rest, missing, replace=False, p=weights)]

    def _acceptable(self, clients: list[int], time: float, busy: Set[int]) -> list[int]:
        free = [client for client in clients if client not in busy]
        if self.availability is None or not free:
            return free
        available = self.availability.available(np.asarray(free, dtype=np.int64), time)
        return [client for client, here in zip(free, available.tolist(), strict=True) if here]
