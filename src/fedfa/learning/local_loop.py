"""The local training loop. There is one; every method, engine and test uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fedfa.learning.algorithm import Algorithm
from fedfa.learning.batches import Fetched
from fedfa.learning.context import Batch, ClientContext, Precision
from fedfa.learning.optimisers import LocalOptimiser
from fedfa.trees import NetworkInput

# torch.autograd.backward without its check of shapes, which imports sympy: half a second at the start of every process
# that trains. The function is private, so a version of torch may lack it.
_engine_run_backward: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)


@dataclass
class LocalProgress:
    """Where a client is in its local training, and what it has measured."""

    stage: str = "preparing"
    """The current stage, for error messages."""
    losses: Tensor | None = None
    """The loss of each step, in any order, ``[steps]``; None if there was no step."""
    samples: int = 0
    """Samples processed, counted once per epoch."""


class Gradients(Protocol):
    """Sets the gradients of the local loss for one batch after the other."""

    def __call__(self, fetched: Fetched) -> Batch:
        """Set the gradients for a batch."""

    def losses(self) -> Tensor | None:
        """The losses of all batches so far; None if there was none."""


def local_training(
    ctx: ClientContext,
    algorithm: Algorithm,
    optimiser: LocalOptimiser,
    epochs: Iterable[Iterator[Fetched]],
    gradients: Gradients,
    progress: LocalProgress,
) -> None:
    """All epochs of a client's local training, with the algorithm's hooks.

    Args:
        ctx: The client.
        algorithm: The method.
        optimiser: For the network's parameters.
        epochs: The batches of each epoch.
        gradients: Sets the gradients for a batch; usually :class:`LossGradients`.
        progress: Receives the current stage and the losses.
    """
    change_gradient, after_step, after_epoch = map(algorithm.hooks, ("gradient", "after_step", "after_epoch"))
    ctx.model.module.train()
    optimiser.reset(ctx.local)
    count = len(batches_of_each_epoch(ctx))
    for epoch, batches in enumerate(epochs):
        ctx.epoch, ctx.last_epoch = epoch, epoch + 1 == count
        for number, fetched in enumerate(batches):
            progress.stage = f"local training (epoch {epoch + 1}, batch {number + 1})"
            batch = gradients(fetched)
            change_gradients(ctx, change_gradient, batch)
            optimiser.step()
            ctx.steps += 1
            progress.samples += fetched.positions.shape[-1]
            for hook in after_step:
                hook(ctx, batch)
        progress.stage = "after epoch"
        for hook in after_epoch:
            hook(ctx)
    progress.losses = gradients.losses()


def change_gradients(ctx: ClientContext, hooks: Sequence[Callable[..., Any]], batch: Batch) -> None:
    """Call hooks ``gradient`` in order; a hook that recomputes the gradients has the earlier ones called again."""
    for position, hook in enumerate(hooks):
        ctx.earlier_gradient_hooks = hooks[:position]
        hook(ctx, batch)


def batches_of_each_epoch(ctx: ClientContext) -> list[int]:
    """Number of batches in each epoch of the round."""
    whole, steps = ctx.batches_per_epoch, ctx.local.steps
    if steps is None:
        return [whole] * ctx.local.epochs
    return [min(whole, steps - done) for done in range(0, steps, whole)] if whole else [0] * steps


class LossGradients:
    """Forward pass, cross-entropy with every component's terms, backward pass."""

    def __init__(self, ctx: ClientContext, algorithm: Algorithm, optimiser: LocalOptimiser) -> None:
        self._ctx, self._optimiser = ctx, optimiser
        self._change_logits, self._change_loss = algorithm.hooks("logits"), algorithm.hooks("loss")
        self._losses: list[Tensor] = []
        self._one: Tensor | None = None
        ctx.compute_gradients = partial(self._compute)

    def __call__(self, fetched: Fetched) -> Batch:
        """Set the gradients for a batch."""
        index, x, y, place = fetched
        features, logits = self._forward(x)
        batch = Batch(x, y, index, features, logits, self._ctx.model.outputs, place=place)
        self._losses.append(self._backward(batch))
        return batch

    def losses(self) -> Tensor | None:
        """The losses of all batches so far."""
        return torch.stack(self._losses) if self._losses else None

    def _compute(self, batch: Batch) -> Tensor:
        """Set the gradients at the current weights again; see :meth:`ClientContext.recompute_gradients`."""
        features, logits = self._forward(batch.x)
        again = Batch(batch.x, batch.y, batch.index, features, logits, self._ctx.model.outputs, place=batch.place)
        loss, earlier = self._backward(again), self._ctx.earlier_gradient_hooks
        change_gradients(self._ctx, earlier, again)
        self._ctx.earlier_gradient_hooks = earlier
        return loss

    def _forward(self, x: NetworkInput) -> tuple[Tensor, Tensor]:
        model, precision = self._ctx.model, self._ctx.local.precision
        with _autocast(precision, self._ctx.device):
            features, logits = model(x)
        if precision != "float32":
            features, logits = features.float(), logits.float()
            model.outputs = {name: output.float() for name, output in model.outputs.items()}
        return features, logits

    def _backward(self, batch: Batch) -> Tensor:
        logits = batch.logits
        for hook in self._change_logits:
            logits = _checked(hook(self._ctx, batch, logits), hook, "logits", batch.logits.shape)
        loss = cross_entropy(logits, batch.y)
        for hook in self._change_loss:
            loss = _checked(hook(self._ctx, batch, loss), hook, "loss", batch.y.shape[:-1])
        self._optimiser.zero_grad()
        if self._one is None or self._one.shape != loss.shape:
            self._one = torch.ones_like(loss)  # with a client axis every client's loss counts alike
        if _engine_run_backward is None:
            torch.autograd.backward(loss, self._one)
        else:
            _engine_run_backward((loss,), (self._one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return loss.detach()


def _checked(value: Any, hook: Callable[..., Any], name: str, shape: torch.Size) -> Tensor:
    """What a hook returned, refused unless it is a tensor of the right shape."""
    if isinstance(value, Tensor) and value.shape == shape:
        return value
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
    advice = "the loss as one number, the mean over the batch" if name == "loss" else f"logits of shape {tuple(shape)}"
    raise ValueError(f"component {hook.__self__.name!r}: `{name}` returned {found}; return {advice}")  # type: ignore[attr-defined]  # a bound method


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over the batch: logits ``[…, B, C]`` and labels ``[…, B]`` give ``[…]``."""
    each = functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(y.shape).mean(-1)


def _autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)
