"""The engine that trains the clients of a round in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedfa.data import Federation, Samples
from fedfa.engines.allocator import keep_freed_memory
from fedfa.engines.shared_tensors import dense
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import ClientResult, ClientWork, RoundPlan
from fedfa.learning.context import Role
from fedfa.learning.evaluate import EvaluatedOn, Evaluation, answers, judge
from fedfa.learning.metrics import Metric
from fedfa.learning.tensors import ComponentTensors, Tensors
from fedfa.models.split import SplitModel
from fedfa.stacking.trainer import StackedTrainer

STACKED_CLIENTS = 64
"""Maximum number of clients in a stack; more gain little and take memory."""


class LocalEngine:
    """Trains and evaluates in this process, in order.

    Args:
        federation: The clients' data and the test set.
        model: The network; its weights are overwritten.
        algorithm: The method.
        roles: Role of each tensor of the model.
        device: Where to compute.
        evaluation_batch: Samples per forward pass in evaluations.
        stacked: Train clients of equal size together; see :mod:`fedfa.stacking`.
        metrics: What evaluations compute besides accuracy and loss.
    """

    def __init__(
        self,
        federation: Federation,
        model: SplitModel,
        algorithm: Algorithm,
        roles: Mapping[str, Role],
        device: torch.device,
        evaluation_batch: int = 500,
        stacked: bool = False,
        metrics: Sequence[Metric] = (),
    ) -> None:
        keep_freed_memory()
        # Convolutions are fastest in channels-last memory; the values are the same. (torch's type stubs lack this
        # combination of arguments.)
        model.module.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        self.federation, self.device, self.evaluation_batch = federation, device, evaluation_batch
        self._arguments = (federation, model, algorithm, roles)
        self.model, self.algorithm, self.roles, self.stacked = model, algorithm, roles, stacked
        self.metrics, self._with_scores = tuple(metrics), bool(metrics)
        self._trainer = StackedTrainer(model, algorithm, roles, device)

    def train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        # Dense, as after serialisation: kernels may add in another order where memory has gaps.
        broadcast = {c: {n: dense(t) for n, t in tensors.items()} for c, tensors in plan.broadcast.items()}
        plan = replace(plan, broadcast=broadcast)
        if self.stacked and not plan.final_pass and len(set(clients)) == len(clients):
            for first in range(0, len(clients), STACKED_CLIENTS):
                chosen = clients[first : first + STACKED_CLIENTS]
                work = [ClientWork(client, self.federation.client(client), client_state(client)) for client in chosen]
                yield from self._trainer.train_together(plan, work)
            return
        for client in clients:
            yield self._trainer.train(plan, client, self.federation.client(client), client_state(client))

    def evaluate(
        self, model: Tensors, broadcast: ComponentTensors, client: int | None = None, on: EvaluatedOn = "test"
    ) -> Evaluation:
        """See :class:`~fedfa.engines.engine.Engine`."""
        return self.judge(self.answers(model, broadcast, client, on), client, on)

    def evaluate_each(
        self, models: Mapping[int, Tensors], broadcast: ComponentTensors, on: EvaluatedOn = "test"
    ) -> dict[int, Evaluation]:
        """See :class:`~fedfa.engines.engine.Engine`."""
        return {
            client: self.evaluate(model, broadcast, client, on)
            for client, model in models.items()
            if len(self.test_samples(client, on))
        }

    def remarks(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def test_samples(self, client: int | None, on: EvaluatedOn = "test") -> Samples:
        """What a model is evaluated on: the whole set, or a client's part of it."""
        federation = self.federation
        if on == "test":
            return federation.dataset.test if client is None else federation.test_of(client)
        assert federation.validation is not None
        return federation.validation.samples if client is None else federation.validation_of(client)

    def answers(
        self,
        model: Tensors,
        broadcast: ComponentTensors,
        client: int | None,
        on: EvaluatedOn = "test",
        first: int = 0,
        last: int | None = None,
    ) -> Tensors:
        """For some of the samples, in order, what :meth:`judge` needs; see :func:`fedfa.learning.evaluate.answers`."""
        test = self.test_samples(client, on)
        inputs, labels = test.inputs[first:last], test.labels[first:last]
        self.model.load(model)
        score = self.score(broadcast)

        def of(rows: Tensor | slice, owner: int | None) -> Tensors:
            return answers(
                self.model,
                inputs[rows],
                labels[rows],
                self.federation.normalisation_of(owner).batch,
                score=score,
                batch_size=self.evaluation_batch,
                device=self.device,
                with_scores=self._with_scores,
            )

        owners = self.federation.owners_of(on) if client is None and self.federation.standardise == "client" else None
        if owners is None:
            return of(slice(None), client)
        # Samples of a client are prepared with its own statistics, whoever's model reads them.
        owners = owners[first:last]
        groups = [(owner, (owners == owner).nonzero().squeeze(1)) for owner in owners.unique().tolist()]
        found = [of(rows, None if owner < 0 else owner) for owner, rows in groups]
        order = torch.cat([rows for _, rows in groups]).argsort()
        return {name: torch.cat([one[name] for one in found])[order] for name in found[0]}

    def judge(self, found: Tensors, client: int | None, on: EvaluatedOn = "test") -> Evaluation:
        """The evaluation, from the answers to all samples."""
        test, dataset = self.test_samples(client, on), self.federation.dataset
        return judge(
            found,
            test.labels,
            self.model.num_classes,
            domains=test.domains,
            domain_names=dataset.domains,
            metrics=self.metrics,
        )

    def score(self, broadcast: ComponentTensors) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The algorithm's scores from features and logits; None where the logits are the scores."""
        return scores_of(self.algorithm, broadcast, self.device)

    def close(self) -> None:
        """Nothing to release."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as constructor arguments, for another interpreter."""
        return _rebuild, (self._with_scores, *self._arguments, self.device, self.evaluation_batch, self.stacked)


def scores_of(
    algorithm: Algorithm, broadcast: ComponentTensors, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The scores ``[N, C]`` of an algorithm from features and logits; None where the logits are the scores."""
    hooks = algorithm.hooks("predict")
    if not hooks:
        return None
    there = {c: {n: dense(t).to(device) for n, t in tensors.items()} for c, tensors in broadcast.items()}

    def score(features: Tensor, logits: Tensor) -> Tensor:
        for hook in hooks:
            logits = hook(there, features, logits)
        return logits

    return score


def _rebuild(with_scores: bool, federation: Federation, model: SplitModel, *others: Any) -> LocalEngine:
    # Tensors arrive in shared memory. That is right for the data; but trained weights must be private.
    model.module._apply(torch.clone)
    engine = LocalEngine(federation, model, *others)
    engine._with_scores = with_scores  # metrics are computed where the answers come together
    return engine
