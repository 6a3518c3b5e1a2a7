"""The engine that trains one client after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedfa.data import Federation
from fedfa.engines.allocator import keep_freed_memory
from fedfa.learning.client import ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.evaluate import Evaluation, evaluate
from fedfa.learning.part import Role
from fedfa.learning.recipe import Recipe
from fedfa.learning.tensors import PartTensors, Tensors
from fedfa.models.split import SplitModel


class LocalEngine:
    """Everything in this process, in order.

    Args:
        federation: The clients' data and the test set.
        model: The network; its weights are overwritten.
        recipe: The method.
        roles: Role of each tensor of the model.
        device: Where to compute.
        evaluation_batch: Samples at a time in evaluations.
    """

    def __init__(
        self,
        federation: Federation,
        model: SplitModel,
        recipe: Recipe,
        roles: Mapping[str, Role],
        device: torch.device,
        evaluation_batch: int = 500,
    ) -> None:
        keep_freed_memory()
        # Channels-last memory is what the CPU's and GPU's convolutions like; values are the same. (torch's
        # type stubs lack this combination of arguments.)
        model.module.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._federation, self._model, self._device = federation, model, device
        self._trainer = ClientTrainer(model, recipe, roles, device)
        self._evaluation_batch = evaluation_batch

    def train(
        self, plan: RoundPlan, clients: Sequence[int], kept: Callable[[int], PartTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        for client in clients:
            yield self._trainer.train(plan, client, self._federation.client(client), kept(client))

    def evaluate(self, model: Tensors, received: PartTensors, client: int | None = None) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`."""
        self._model.load(model)
        dataset = self._federation.dataset
        test = dataset.test if client is None else self._federation.test_of(client)
        return evaluate(
            self._model,
            test.inputs,
            test.labels,
            dataset.normalisation.batch,
            domains=test.domains,
            domain_names=dataset.domains,
            score=self._score(received),
            batch_size=self._evaluation_batch,
            device=self._device,
        )

    def _score(self, received: PartTensors) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The recipe's way to predict, None where it is the network's own."""
        hooks = self._trainer.recipe.hooks("predict")
        if not hooks:
            return None
        there = {part: {n: t.to(self._device) for n, t in tensors.items()} for part, tensors in received.items()}

        def score(features: Tensor, logits: Tensor) -> Tensor:
            for hook in hooks:
                logits = hook(there, features, logits)
            return logits

        return score

    def close(self) -> None:
        """Nothing to let go of."""
