"""The one local training loop of the project.

It serves a client alone, with inputs ``[B, …]`` and a scalar loss, and several clients side by side
(:mod:`fedfa.learning.stacking`), with inputs ``[K, B, …]`` and one loss for each: all reduce over trailing axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedfa.learning.batches import Batches, Fetching
from fedfa.learning.optimisers import Sgd
from fedfa.learning.part import Batch, ClientContext, Precision
from fedfa.learning.recipe import Recipe
from fedfa.learning.stacking import SideBySide

# What torch.autograd.backward itself calls. It is private, so a torch may come that has it no more.
_engine_run_backward: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)


@dataclass
class LocalSteps:
    """A client's way through its local steps, and what remains of it."""

    stage: str = "preparing"
    """Where it is, for messages."""
    losses: Tensor | None = None
    """The loss of each step in any order, ``[steps]``, or ``[steps, K]`` of K clients; None if there was no step."""
    samples: int = 0
    """Samples seen by a client, counted once per epoch."""

    def of_each(self, clients: int) -> list[LocalSteps]:
        """The same of each of the clients that were side by side."""
        losses = [None] * clients if self.losses is None else self.losses.unbind(1)
        return [LocalSteps(self.stage, own, self.samples) for own in losses]


def take_local_steps(
    ctx: ClientContext,
    recipe: Recipe,
    optimiser: Sgd,
    data: Batches | SideBySide,
    shuffles: Sequence[np.random.Generator],
    way: LocalSteps,
) -> None:
    """All epochs of local training, with the recipe's hooks.

    Args:
        ctx: The client (or the clients side by side).
        recipe: The method.
        optimiser: For the context's parameters.
        data: The samples.
        shuffles: The stream that orders the samples; one for each client where there are several.
        way: Told where the loop is, and what it met.
    """
    device, local = ctx.device, ctx.local
    change_logits, change_loss = recipe.hooks("logits"), recipe.hooks("loss")
    change_gradient, after_step, after_epoch = (recipe.hooks(h) for h in ("gradient", "after_step", "after_epoch"))
    ctx.model.module.train()
    optimiser.reset(local)
    one: Tensor | None = None
    chain = None if change_logits or change_loss else ctx.model.chain  # then the loss is the cross-entropy alone
    watched = bool(change_gradient or after_step or after_epoch)  # whether anybody sees a step's tensors
    fetching = Fetching(data, local.batch_size, ctx.num_classes, device)
    losses: list[Tensor] = []  # of each step; or what they are made of
    labels: list[Tensor] = []
    for epoch, batches in enumerate(fetching.epochs(shuffles, ctx.size, _batches_of_each_epoch(ctx))):
        ctx.epoch = epoch
        for number, (index, x, y, place) in enumerate(batches):
            way.stage = f"local training (epoch {epoch + 1}, batch {number + 1})"
            if chain is not None:
                targets = place[0].targets(place[1], ctx.model.head.weight.dtype)
                features, logits, log_shares = chain.set_gradients(x, targets, seen=watched)
                if watched:
                    batch = Batch(x, y, index, features, logits, place=place)
                losses.append(log_shares)
                labels.append(y)
            else:
                with _computing_in(local.precision, device):
                    features, logits = ctx.model(x)
                if local.precision != "float32":
                    features, logits = features.float(), logits.float()
                    ctx.model.outputs = {name: output.float() for name, output in ctx.model.outputs.items()}
                batch = Batch(x, y, index, features, logits, ctx.model.outputs, place=place)
                for hook in change_logits:
                    logits = hook(ctx, batch, logits)
                loss = cross_entropy(logits, y)
                for hook in change_loss:
                    loss = hook(ctx, batch, loss)
                if loss.shape != y.shape[:-1]:
                    raise ValueError(
                        f"a loss of shape {tuple(loss.shape)}; there must be one number for each client, "
                        f"that is {tuple(y.shape[:-1])}: a part's hook `loss` returns the mean over the batch"
                    )
                optimiser.zero_grad()
                if one is None:
                    one = torch.ones_like(loss)  # a client's loss is its own: none of them counts more or less
                tensors, gradients = zip((loss, one), *batch.known, strict=True)
                _backward(tensors, gradients)
                losses.append(loss.detach())
            for hook in change_gradient:
                hook(ctx, batch)
            optimiser.step()
            ctx.steps += 1
            way.samples += index.shape[-1]
            for hook in after_step:
                hook(ctx, batch)
        way.stage = "after epoch"
        for hook in after_epoch:
            hook(ctx)
    if losses:
        way.losses = torch.stack(losses) if chain is None else _means(losses, labels)


def _backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward``, without the look at shapes that loads an algebra system the first time.

    That takes half a second at the start of every process that trains. The shapes have been looked at before.
    """
    if _engine_run_backward is None:
        torch.autograd.backward(tensors, gradients)
    else:
        _engine_run_backward(tensors, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _batches_of_each_epoch(ctx: ClientContext) -> list[int]:
    whole, steps = ctx.batches_per_epoch, ctx.local.steps
    if steps is None:
        return [whole] * ctx.local.epochs
    return [min(whole, steps - done) for done in range(0, steps, whole)] if whole else [0] * steps


def _means(log_shares: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """The mean cross-entropy of each step's batch; of all steps with batches of one size at once."""
    by_size: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for scores, y in zip(log_shares, labels, strict=True):
        by_size.setdefault(y.shape[-1], []).append((scores, y))
    means = []
    for group in by_size.values():
        scores, y = (torch.stack(each) for each in zip(*group, strict=True))
        means.append(scores.gather(-1, y.unsqueeze(-1)).squeeze_(-1).neg_().mean(-1))
    return torch.cat(means)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over the batch, for each client: logits ``[…, B, C]`` and labels ``[…, B]`` give ``[…]``."""
    each = functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(y.shape).mean(-1)


def _computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)
