"""Selections that go by what is known of clients: power-of-choice and Oort.

**Power-of-choice** (Y. J. Cho, J. Wang, G. Joshi, *Towards Understanding Biased Client Selection in Federated
Learning*, AISTATS 2022): draw candidates in proportion to their samples, and take those with the highest loss. This is
the paper's variant rpow-d, which needs no further messages: a client's loss is the mean local loss of its last
contribution, and one that never contributed comes first.

**Oort** (F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury, *Oort: Efficient Federated Learning via Guided Participant
Selection*, OSDI 2021): a share ε of the cohort are clients that were never tried, drawn evenly; the others are drawn in
proportion to their utility, among those whose utility is at least 95 % of that of the last one who would get a place.
The utility of client i in round R is::

    u_i = (U_i − min U) / (max U − min U) + √(0.1 ln R / L_i),      times (T / t_i)^2 where t_i > T

with U_i = n_i · loss_i, cut at its 95th percentile; L_i the round of its last contribution, t_i the time of its last
visit, T the preferred time. Differences to the paper: loss_i is the mean of the local losses, not the root of the mean
square over samples, which clients do not send; T is the median of the known times, where the paper's pacer moves it.
Without a clock the last factor is 1.

Memory is one row per client that was ever tried, in the server state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedfa.fleet.availability import Floats, Ints
from fedfa.learning.round import ServerState

SELECTION = "selection"
"""Name among the components of the server state."""
EXPLORED_FIRST, EXPLORED_LEAST, EXPLORATION_DECAY = 0.9, 0.2, 0.98
"""ε in the first round, at least, and its factor per round; as in Oort's experiments."""
_CUT_OFF, _CLIPPED, _PENALTY = 0.95, 95.0, 2.0


@dataclass(frozen=True)
class KnownClients:
    """What the server knows of the clients that it tried: a column per fact, in ascending order of the clients.

    Example:
        >>> known = KnownClients().after(1, {7: 0.5, 3: 2.0}, {7: 12.0, 4: 60.0})
        >>> known.clients.tolist(), known.loss_of([3, 4, 7, 9]).tolist()
        ([3, 4, 7], [2.0, 0.0, 0.5, inf])
    """

    clients: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    loss: Floats = field(default_factory=lambda: np.zeros(0))
    """Of the last contribution; 0 for a client that was tried and never contributed."""
    last: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Round of the last visit, counted from 1."""
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    """Virtual seconds of the last visit; 0 without a clock."""

    @classmethod
    def of(cls, state: ServerState) -> KnownClients:
        """The memory in a server state."""
        if (found := state.components.get(SELECTION)) is None:
            return cls()
        return cls(*(found[name].numpy() for name in ("clients", "loss", "last", "seconds")))

    def added_to(self, state: ServerState) -> ServerState:
        """The server state with this memory."""
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in vars(self).items()}
        return replace(state, components={**state.components, SELECTION: tensors})

    def after(self, round: int, losses: Mapping[int, float], seconds: Mapping[int, float]) -> KnownClients:
        """The memory after a round: of each client that contributed its loss, of each visit that ended its time."""
        rows = dict(zip(self.clients.tolist(), zip(self.loss, self.last, self.seconds, strict=True), strict=True))
        for client in {*losses, *seconds}:
            loss, _, taken = rows.get(client, (0.0, round, 0.0))
            rows[client] = (losses.get(client, loss), round, seconds.get(client, taken))
        clients = sorted(rows)
        loss, last, taken = zip(*(rows[client] for client in clients), strict=True) if rows else ((), (), ())
        return KnownClients(np.asarray(clients, dtype=np.int64), np.asarray(loss, dtype=np.float64),
                            np.asarray(last, dtype=np.int64), np.asarray(taken, dtype=np.float64))  # fmt: skip

    def loss_of(self, clients: Sequence[int]) -> Floats:
        """The loss of these clients; infinite where it is not known."""
        by_client = dict(zip(self.clients.tolist(), self.loss.tolist(), strict=True))
        return np.asarray([by_client.get(client, np.inf) for client in clients])

    def only(self, clients: Sequence[int]) -> KnownClients:
        """The rows of these clients."""
        chosen = np.isin(self.clients, np.asarray(clients, dtype=np.int64))
        return KnownClients(self.clients[chosen], self.loss[chosen], self.last[chosen], self.seconds[chosen])

    def utility(self, sizes: Ints, round: int) -> Floats:
        """Oort's utility of each known client; see the module.

        Args:
            sizes: Samples of each client of the federation.
            round: Counted from 1.
        """
        if not len(self.clients):
            return np.zeros(0)
        gain = sizes[self.clients] * self.loss
        gain = np.minimum(gain, np.percentile(gain, _CLIPPED))
        spread = np.ptp(gain)
        utility = (gain - gain.min()) / spread if spread > 0 else np.ones_like(gain)
        utility = utility + np.sqrt(0.1 * np.log(round) / self.last)
        timed = self.seconds > 0
        if timed.any():
            preferred = np.median(self.seconds[timed])
            slow = timed & (self.seconds > preferred)
            utility[slow] *= (preferred / self.seconds[slow]) ** _PENALTY
        return np.asarray(utility)


def power_of_choice(candidates: Sequence[int], count: int, known: KnownClients) -> list[int]:
    """The candidates with the highest losses; of equal ones those that were drawn first.

    Example:
        >>> power_of_choice([7, 3, 9], 2, KnownClients().after(1, {7: 0.5, 3: 2.0}, {}))
        [9, 3]
    """
    order = np.argsort(-known.loss_of(candidates), kind="stable")[:count]
    return [candidates[place] for place in order]


def oort(
    count: int,
    known: KnownClients,
    untried: Callable[[int], list[int]],
    sizes: Ints,
    round: int,
    rng: np.random.Generator,
) -> list[int]:
    """Oort's choice.

    Args:
        count: How many clients.
        known: What is known of those that can be drawn.
        untried: Draws at most so many clients of which nothing is known.
        sizes: Samples of each client of the federation.
        round: Counted from 1.
        rng: Draws.
    """
    share = max(EXPLORED_LEAST, EXPLORED_FIRST * EXPLORATION_DECAY ** (round - 1))
    new = untried(max(count - len(known.clients), int(share * count + 0.5)))
    places = min(count - len(new), len(known.clients))
    if not places:
        return new
    utility = known.utility(sizes, round)
    pool = np.flatnonzero(utility >= _CUT_OFF * np.sort(utility)[-places])
    weights = utility[pool] if utility[pool].sum() > 0 else np.ones(len(pool))
    if np.count_nonzero(weights) < places:
        weights = weights + np.finfo(np.float64).eps
    chosen = rng.choice(known.clients[pool], places, replace=False, p=weights / weights.sum())
    return [*new, *(int(client) for client in chosen)]
