"""The engine that trains one client after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedfa.data import Federation, Samples
from fedfa.engines.allocator import keep_freed_memory
from fedfa.engines.shared_tensors import dense
from fedfa.learning.client import ClientResult, ClientTrainer, ClientWork, RoundPlan
from fedfa.learning.evaluate import Evaluation, answers, judge
from fedfa.learning.part import Role
from fedfa.learning.recipe import Recipe
from fedfa.learning.tensors import PartTensors, Tensors
from fedfa.models.split import SplitModel

SIDE_BY_SIDE = 64
"""Clients at most that are stacked; more gain little and take memory."""


class LocalEngine:
    """Everything in this process, in order.

    Args:
        federation: The clients' data and the test set.
        model: The network; its weights are overwritten.
        recipe: The method.
        roles: Role of each tensor of the model.
        device: Where to compute.
        evaluation_batch: Samples at a time in evaluations.
        stacked: Train clients side by side, where they are alike; see :mod:`fedfa.engines.execution`.
    """

    def __init__(
        self,
        federation: Federation,
        model: SplitModel,
        recipe: Recipe,
        roles: Mapping[str, Role],
        device: torch.device,
        evaluation_batch: int = 500,
        stacked: bool = False,
    ) -> None:
        keep_freed_memory()
        # Channels-last memory is what the CPU's and GPU's convolutions like; values are the same. (torch's
        # type stubs lack this combination of arguments.)
        model.module.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.federation, self.device, self.evaluation_batch = federation, device, evaluation_batch
        self._made_of = (federation, model, recipe, roles)
        self.model, self.recipe, self.roles, self.stacked = model, recipe, roles, stacked
        self._trainer = ClientTrainer(model, recipe, roles, device)

    def train(
        self, plan: RoundPlan, clients: Sequence[int], kept: Callable[[int], PartTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        # What is sent has no gaps in memory, as it would have none after a journey: kernels may add in another order.
        received = {part: {n: dense(t) for n, t in tensors.items()} for part, tensors in plan.received.items()}
        plan = replace(plan, received=received)
        if self.stacked and not plan.survey and len(set(clients)) == len(clients):
            for block in range(0, len(clients), SIDE_BY_SIDE):
                chosen = clients[block : block + SIDE_BY_SIDE]
                yield from self._trainer.train_stacked(
                    plan, [ClientWork(client, self.federation.client(client), kept(client)) for client in chosen]
                )
            return
        for client in clients:
            yield self._trainer.train(plan, client, self.federation.client(client), kept(client))

    def evaluate(self, model: Tensors, received: PartTensors, client: int | None = None) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`."""
        return self.judge(self.answers(model, received, client), client)

    def evaluate_each(self, models: Mapping[int, Tensors], received: PartTensors) -> dict[int, Evaluation]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        return {client: self.evaluate(model, received, client) for client, model in models.items()}

    def remarks(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def test_samples(self, client: int | None) -> Samples:
        """What a model is tested on: the test set, or a client's part of it."""
        return self.federation.dataset.test if client is None else self.federation.test_of(client)

    def answers(
        self, model: Tensors, received: PartTensors, client: int | None, first: int = 0, last: int | None = None
    ) -> Tensors:
        """For some of the test samples, in order, whether the prediction is right, and the loss; for :meth:`judge`."""
        test = self.test_samples(client)
        self.model.load(model)
        hit, loss = answers(
            self.model,
            test.inputs[first:last],
            test.labels[first:last],
            self.federation.dataset.normalisation.batch,
            score=self._score(received),
            batch_size=self.evaluation_batch,
            device=self.device,
        )
        return {"hit": hit, "loss": loss}

    def judge(self, answers: Tensors, client: int | None) -> Evaluation:
        """The evaluation, from the answers to all test samples."""
        test, dataset = self.test_samples(client), self.federation.dataset
        return judge(
            answers["hit"],
            answers["loss"],
            test.labels,
            self.model.num_classes,
            domains=test.domains,
            domain_names=dataset.domains,
        )

    def _score(self, received: PartTensors) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The recipe's way to predict, None where it is the network's own."""
        hooks = self._trainer.recipe.hooks("predict")
        if not hooks:
            return None
        there = {part: {n: dense(t).to(self.device) for n, t in tensors.items()} for part, tensors in received.items()}

        def score(features: Tensor, logits: Tensor) -> Tensor:
            for hook in hooks:
                logits = hook(there, features, logits)
            return logits

        return score

    def close(self) -> None:
        """Nothing to let go of."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another interpreter: made anew there, from the same things."""
        return _made_anew, (*self._made_of, self.device, self.evaluation_batch, self.stacked)


def _made_anew(federation: Federation, model: SplitModel, *others: Any) -> LocalEngine:
    # Tensors arrive as shared memory. That is right for the data; but weights that are trained must be one's own.
    model.module._apply(torch.clone)
    return LocalEngine(federation, model, *others)
