"""The one local training loop of the project.

It serves a client alone, with inputs ``[B, …]`` and a scalar loss, and several clients side by side
(:mod:`fedfa.learning.stacking`), with inputs ``[K, B, …]`` and one loss for each: all reduce over trailing axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedfa.learning.optimisers import Sgd
from fedfa.learning.part import Batch, ClientContext, Precision
from fedfa.learning.recipe import Recipe
from fedfa.learning.stacking import SideBySide


class Batches(Protocol):
    """What the loop needs of a client's data."""

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs ready for the network, and labels, at these positions."""


def _in_order(data: Batches | SideBySide, order: Tensor) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Inputs and labels of a stretch of the order."""
    if isinstance(data, SideBySide):
        return data.in_order(order)
    return lambda first, last: data.batch(order[first:last])


@dataclass
class LocalSteps:
    """A client's way through its local steps, and what remains of it."""

    stage: str = "preparing"
    """Where it is, for messages."""
    losses: list[Tensor] = field(default_factory=list)
    """The loss of each step (one number, or one for each client), or of all steps."""
    samples: int = 0
    """Samples seen by a client, counted once per epoch."""

    def loss_of_each_step(self) -> list[float]:
        """One client's losses."""
        return torch.hstack(self.losses).tolist() if self.losses else []

    def of_each(self, clients: int) -> list[LocalSteps]:
        """The same of each of the clients that were side by side."""
        losses = [[own] for own in torch.stack(self.losses, 1)] if self.losses else [[]] * clients
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
    device, local = ctx.label_counts.device, ctx.local
    change_logits, change_loss = recipe.hooks("logits"), recipe.hooks("loss")
    change_gradient, after_step, after_epoch = (recipe.hooks(h) for h in ("gradient", "after_step", "after_epoch"))
    ctx.model.module.train()
    optimiser.reset(local)
    epochs = local.epochs if local.steps is None else -(-local.steps // max(1, ctx.batches_per_epoch))
    one: Tensor | None = None
    chain = None if change_logits or change_loss else ctx.model.chain  # then the loss is the cross-entropy alone
    for epoch in range(epochs):
        ctx.epoch = epoch
        orders = [shuffle.permutation(ctx.size) for shuffle in shuffles]
        order = torch.from_numpy(np.stack(orders) if ctx.label_counts.dim() > 1 else orders[0])
        samples = _in_order(data, order)
        for number in range(ctx.batches_per_epoch):
            if ctx.steps == local.steps:
                break
            way.stage = f"local training (epoch {epoch + 1}, batch {number + 1})"
            first, last = number * local.batch_size, (number + 1) * local.batch_size
            index = order[..., first:last]
            x, y = samples(first, last)
            x, y = x.to(device), y.to(device)
            if chain is not None:
                features, logits, loss = chain.set_gradients(x.flatten(y.dim()), y)
                batch = Batch(x, y, index, features, logits)
            else:
                with _computing_in(local.precision, device):
                    features, logits = ctx.model(x)
                if local.precision != "float32":
                    features, logits = features.float(), logits.float()
                    ctx.model.outputs = {name: output.float() for name, output in ctx.model.outputs.items()}
                batch = Batch(x, y, index, features, logits, ctx.model.outputs)
                for hook in change_logits:
                    logits = hook(ctx, batch, logits)
                loss = cross_entropy(logits, y)
                for hook in change_loss:
                    loss = hook(ctx, batch, loss)
                optimiser.zero_grad()
                if one is None:
                    one = torch.ones_like(loss)  # a client's loss is its own: none of them counts more or less
                torch.autograd.backward(loss, one)
            for hook in change_gradient:
                hook(ctx, batch)
            optimiser.step()
            ctx.steps += 1
            way.losses.append(loss.detach())
            way.samples += index.shape[-1]
            for hook in after_step:
                hook(ctx, batch)
        way.stage = "after epoch"
        for hook in after_epoch:
            hook(ctx)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over the batch, for each client: logits ``[…, B, C]`` and labels ``[…, B]`` give ``[…]``."""
    each = functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(y.shape).mean(-1)


def _computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)
