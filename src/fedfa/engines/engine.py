"""What an engine is: a way to carry the clients' jobs. Engines know no method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.evaluate import Evaluation
from fedfa.learning.tensors import PartTensors, Tensors


class Engine(Protocol):
    """Trains the clients of a round and evaluates models."""

    def train(
        self, plan: RoundPlan, clients: Sequence[int], kept: Callable[[int], PartTensors]
    ) -> Iterator[ClientResult]:
        """Train these clients; results come in the given order, so that sums do not depend on who was faster.

        An engine whose clients can fail (a network) may go on without some of them, or with others in their place.

        Args:
            plan: What all clients receive.
            clients: Their numbers.
            kept: Gives what a client kept from earlier rounds.
        """

    def evaluate(self, model: Tensors, received: PartTensors, client: int | None = None) -> Evaluation:
        """Evaluate weights on the test set.

        Args:
            model: The weights.
            received: What a client would receive of each part's state (prototypes that classify …).
            client: Whose model it is; then only the test samples of the domains this client has data of count.
        """

    def evaluate_each(self, models: Mapping[int, Tensors], received: PartTensors) -> dict[int, Evaluation]:
        """Evaluate clients' own models, each as :meth:`evaluate` does."""

    def remarks(self) -> dict[str, Any]:
        """What the engine has to add to the record of the round that just ended."""

    def close(self) -> None:
        """Let go of processes and memory."""
