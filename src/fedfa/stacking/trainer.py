"""Clients of one cohort trained together, as one network with a leading client axis.

What each client's components prepared in ``begin`` is joined tensor by tensor, the local loop runs once for all, and
what it left is split again for each client's ``contribute``. Only the hooks that run per batch and per epoch see the
client axis. Clients of equal size whose components prepared the same kinds of things form a group; a client without a
partner trains alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fedfa.errors import ClientError, describe
from fedfa.learning.batches import FETCHED, Fetched, cut_batches
from fedfa.learning.client import (
    ClientResult,
    ClientRound,
    ClientTrainer,
    ClientWork,
    RoundPlan,
    TrainedNetwork,
    refuse_non_finite,
)
from fedfa.learning.context import Batch, ClientContext
from fedfa.learning.local_loop import Gradients, LocalProgress, LossGradients, batches_of_each_epoch, local_training
from fedfa.learning.random import stream, torch_stream
from fedfa.learning.tensors import Tensors, clone
from fedfa.stacking.chain import Chain
from fedfa.stacking.client_axis import StackedSamples, join, signature, slice_of
from fedfa.stacking.stacked_model import StackedModel
from fedfa.stacking.support import reads_trained_model

CACHED_MODELS = 8
"""Maximum number of cached stacked models, keyed by group size."""


class StackedTrainer(ClientTrainer):
    """A :class:`ClientTrainer` that also trains groups of clients as one network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cached: dict[int, TrainedNetwork] = {}
        self._reads_trained_model = reads_trained_model(self.algorithm)

    def train_together(self, plan: RoundPlan, clients: Sequence[ClientWork]) -> list[ClientResult]:
        """One round of several clients, in groups where they can be; results in the order given.

        Raises:
            ClientError: As :meth:`train`. After an error in common steps each client of the group is trained alone to
                find the one that caused it.
        """
        started = time.process_time()  # once for all: to ask for it takes long beside a small client's work
        works = [ClientRound(self, plan, client) for client in clients]
        began: dict[int, Tensors] = {}
        with torch_stream(plan.seed, "torch", plan.round, clients[0].client, device=self.device):
            groups: dict[object, list[ClientRound]] = {}
            for work in works:
                began[work.client] = work.guarded(partial(self._begin, work))
                groups.setdefault((work.data.size, work.ctx.local.steps, signature(work.ctx.scratch)), []).append(work)
            results: dict[int, ClientResult] = {}
            for group in groups.values():
                try:
                    states = self._train_group(group, began)
                except Exception as error:
                    self._find_client(error, group)
                updates = None if self._reads_trained_model else self.updates(group, states)
                for k, (work, state) in enumerate(zip(group, states, strict=True)):
                    if updates is None:
                        self.model.load(state)
                        results[work.client] = work.guarded(work.finish)
                    else:
                        results[work.client] = work.guarded(partial(work.finish, (state, updates[k])))
                refuse_non_finite(group, results)
        seconds = (time.process_time() - started) / max(1, len(works))
        for result in results.values():
            result.cpu_seconds = seconds
        return [results[work.client] for work in works]

    def _begin(self, work: ClientRound) -> Tensors:
        """Let the components prepare; the weights with which the client's local training begins."""
        if self.algorithm.hooks("begin"):
            work.begin()
            return clone(self.model.state())
        work.ctx = work.context()
        return work.ctx.start

    def _find_client(self, error: Exception, group: list[ClientRound]) -> NoReturn:
        """Raise the error of the client that caused an error in common steps."""
        for work in group:
            self.train(work.plan, work.client, work.data, work.given)  # raises it, if it is this client's
        first, others = group[0], ", ".join(str(work.client) for work in group[1:])
        hint = f' (stacked with {others}; alone they train: set engine.execution = "each")' if others else ""
        problem = f"{describe(error)}{hint}"
        raise ClientError(first.client, first.plan.round + 1, first.progress.stage, problem) from error

    def _train_group(self, group: list[ClientRound], began: dict[int, Tensors]) -> list[Tensors]:
        """The local training of a group; the weights its clients end with."""
        first = group[0]
        if len(group) == 1:
            self.model.load(began[first.client])
            first.train()
            return [clone(self.model.state())]
        network = self._cached.pop(len(group), None) or self.trained_network(StackedModel(self.model, len(group)))
        self._cached[len(group)] = network  # last, as the most recently used
        if len(self._cached) > CACHED_MODELS:
            del self._cached[next(iter(self._cached))]
        model = network.model
        assert isinstance(model, StackedModel)
        model.load_each([began[work.client] for work in group])
        # What belongs to a single client is left out: a hook that reads it fails instead of getting another client's.
        ctx = replace(
            first.ctx,
            client=-1,
            model=model,
            parameters=network.shared,
            start={},
            client_state={},
            make_rng=_no_common_stream,
            data=None,
            count_labels=lambda: torch.stack([work.ctx.label_counts for work in group]),
            scratch=join([work.ctx.scratch for work in group]),
        )
        progress = LocalProgress()
        try:
            self._train_stacked(ctx, network, group, progress)
        finally:
            first.progress.stage = progress.stage
        losses = [None] * len(group) if progress.losses is None else progress.losses.unbind(1)
        for k, (work, own_losses) in enumerate(zip(group, losses, strict=True)):
            work.progress = LocalProgress(progress.stage, own_losses, progress.samples)
            work.ctx.scratch = slice_of(ctx.scratch, k)
            work.ctx.steps, work.ctx.epoch = ctx.steps, ctx.epoch
        return model.states()

    def _train_stacked(
        self, ctx: ClientContext, network: TrainedNetwork, group: list[ClientRound], progress: LocalProgress
    ) -> None:
        samples = StackedSamples([work.data for work in group])
        shuffles = [stream(work.plan.seed, "shuffle", ctx.round, work.client) for work in group]
        epochs = _epochs(samples, shuffles, ctx)
        local_training(ctx, self.algorithm, network.optimiser, epochs, self._gradients(ctx, network), progress)

    def _gradients(self, ctx: ClientContext, network: TrainedNetwork) -> Gradients:
        hooks, model = self.algorithm.hooks, network.model
        assert isinstance(model, StackedModel)
        if model.chain is None or hooks("logits") or hooks("loss"):  # the chain has the plain cross-entropy only
            return LossGradients(ctx, self.algorithm, network.optimiser)
        observed = bool(hooks("gradient") or hooks("after_step") or hooks("after_epoch"))
        return ChainGradients(model.chain, model.head.weight.dtype, observed)


class ChainGradients:
    """The gradients of a fully connected network without autograd; see :mod:`fedfa.stacking.chain`.

    Args:
        chain: The network's layers.
        dtype: Of the logits.
        observed: Whether a hook reads the tensors of a step.
    """

    def __init__(self, chain: Chain, dtype: torch.dtype, observed: bool) -> None:
        self._chain, self._dtype, self._observed = chain, dtype, observed
        self._scores: list[tuple[Tensor, Tensor]] = []
        self._batch: Batch | None = None
        """The last one; where nothing reads it, the first one serves for all."""

    def __call__(self, fetched: Fetched) -> Batch:
        """Set the gradients for a batch."""
        index, x, y, place = fetched
        targets = place[0].targets(place[1], self._dtype)
        features, logits, log_shares = self._chain.set_gradients(x, targets, seen=self._observed)
        self._scores.append((log_shares, y))
        if self._observed or self._batch is None:
            self._batch = Batch(x, y, index, features, logits, place=place)
        return self._batch

    def losses(self) -> Tensor | None:
        """The mean cross-entropy of each batch; of all batches of one size at once."""
        by_size: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for scores, y in self._scores:
            by_size.setdefault(y.shape[-1], []).append((scores, y))
        means = []
        for group in by_size.values():
            scores, y = (torch.stack(each) for each in zip(*group, strict=True))
            means.append(scores.gather(-1, y.unsqueeze(-1)).squeeze_(-1).neg_().mean(-1))
        return torch.cat(means) if means else None


def _epochs(
    data: StackedSamples, shuffles: Sequence[np.random.Generator], ctx: ClientContext
) -> Iterator[Iterator[Fetched]]:
    """The batches of each epoch; several epochs are arranged at once, because small clients make that worthwhile."""
    samples, size, counts = ctx.size, ctx.local.batch_size, batches_of_each_epoch(ctx)
    at_once = max(1, FETCHED // max(1, data.nbytes))
    in_an_epoch = max(1, -(-samples // size))
    for first in range(0, len(counts), at_once):
        some = counts[first : first + at_once]
        orders = np.stack([shuffle.permutation(samples) for _ in some for shuffle in shuffles])
        order = torch.from_numpy(orders).view(len(some), len(shuffles), samples)
        batches = cut_batches(order, *data.in_order(order), size, ctx.num_classes, ctx.device)
        for count in some:
            yield iter(list(islice(batches, in_an_epoch))[:count])


def _no_common_stream() -> NoReturn:
    raise RuntimeError("ctx.rng belongs to one client; a component that draws per batch or epoch cannot be stacked")
