"""The selection of a round's clients."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedfa.errors import ConfigError
from fedfa.learning.random import stream

Selection = Literal["uniform", "size", "authors", "poisson", "power-of-choice", "oort"]
INFORMED: tuple[Selection, ...] = ("power-of-choice", "oort")
"""Selections that go by what is known of clients; see :mod:`fedfa.fleet.informed`."""


def choose_cohort(
    sizes: np.ndarray, count: int, selection: Selection, seed: int, round: int, holders: np.ndarray | None = None
) -> list[int]:
    """Draw the clients of a round, without replacement, in the order in which their results are summed.

    Clients without samples are never drawn.

    Args:
        sizes: Samples of each client.
        count: How many to draw; with ``"poisson"``, how many on average.
        selection: ``"uniform"``; ``"size"``, with probability proportional to the number of samples; ``"authors"``,
            uniform from a generator seeded with ``seed + round``, as the reference code does; ``"poisson"``, each
            client independently with the same probability, drawn again if nobody was.
        seed: Seed of the training.
        round: Counted from 0.
        holders: The clients with samples, where that is known already.
    """
    assert selection not in INFORMED, "these need to know the clients: fedfa.fleet.selection.Selector"
    candidates = np.flatnonzero(sizes) if holders is None else holders
    if count > len(candidates):
        raise ConfigError(
            f"the cohort has {count} clients, but only {len(candidates)} of {len(sizes)} hold samples; "
            "lower cohort.clients (or cohort.rate) or change data.partition"
        )
    if count == 0:
        return []
    if selection == "poisson":
        draw = stream(seed, "cohort", round)
        while not len(drawn := candidates[draw.random(len(candidates)) < count / len(candidates)]):
            pass
        return [int(client) for client in draw.permutation(drawn)]
    if selection == "authors":
        state = np.random.RandomState((seed + round) % 2**32)  # it takes no larger ones
        chosen = state.choice(candidates, count, replace=False)
    else:
        weights = sizes[candidates] / sizes[candidates].sum() if selection == "size" else None
        chosen = stream(seed, "cohort", round).choice(candidates, count, replace=False, p=weights)
    return [int(client) for client in chosen]
