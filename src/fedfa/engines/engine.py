"""The interface of engines, which carry plans to clients. Engines know no method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.evaluate import EvaluatedOn, Evaluation
from fedfa.learning.tensors import ComponentTensors, Tensors


class Engine(Protocol):
    """Trains the clients of a round and evaluates models."""

    def train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        """Train these clients; results come in the given order, so that sums do not depend on speed.

        An engine whose clients can fail (over a network) may continue without some, or with others in their place.

        Args:
            plan: What all clients receive.
            clients: Their numbers.
            client_state: Gives a client's state from earlier rounds.
        """

    def evaluate(
        self, model: Tensors, broadcast: ComponentTensors, client: int | None = None, on: EvaluatedOn = "test"
    ) -> Evaluation:
        """Evaluate weights on the test set, or on the validation samples.

        Args:
            model: The weights.
            broadcast: What a client would receive of each component's state (prototypes that classify …).
            client: Whose model it is; then only the test samples of the domains this client has data of count, and
                of validation samples that clients hold out, only this client's.
            on: The set of samples.
        """

    def evaluate_each(
        self, models: Mapping[int, Tensors], broadcast: ComponentTensors, on: EvaluatedOn = "test"
    ) -> dict[int, Evaluation]:
        """Evaluate clients' own models, each as :meth:`evaluate` does; without clients that have no such samples."""

    def remarks(self) -> dict[str, Any]:
        """Values to add to the record of the round that just ended."""

    def close(self) -> None:
        """Release processes and memory."""
