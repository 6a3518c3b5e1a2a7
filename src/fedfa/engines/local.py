"""The engine that trains one client after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

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

    def evaluate(self, model: Tensors) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`."""
        self._model.load(model)
        dataset = self._federation.dataset
        return evaluate(
            self._model,
            dataset.test.inputs,
            dataset.test.labels,
            dataset.normalisation.batch,
            domains=dataset.test.domains,
            domain_names=dataset.domains,
            batch_size=self._evaluation_batch,
            device=self._device,
        )

    def close(self) -> None:
        """Nothing to let go of."""
