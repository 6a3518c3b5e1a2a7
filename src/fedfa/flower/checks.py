"""What arrives is checked before it is used.

The server knows what a client sends in a round because it is one for a moment: it makes a single local step on a few
made-up samples with the round's own plan, through the very loop that the sites run. Names, shapes and types of the
result are the *form*; every update must have it. No method has to describe itself, and methods of one's own are checked
like the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfa.flower.messages import BadMessageError, SiteResult
from fedfa.learning.client import ClientTrainer, RoundPlan
from fedfa.learning.recipe import Recipe
from fedfa.learning.sums import WeightedSum
from fedfa.learning.tensors import first_non_finite

_SAMPLES = 4
"""Enough for BatchNorm."""


@dataclass(frozen=True)
class Blank:
    """Names, shapes and types of a group of sums, and the shape of its weight."""

    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    weight: torch.Size

    @classmethod
    def of(cls, entry: WeightedSum) -> Blank:
        """The form of these sums."""
        tensors = {name: (value.shape, value.dtype) for name, value in entry.tensors.items()}
        return cls(tensors, entry.weight.shape)


Form = Mapping[str, Blank]
"""What a client sends, by ``part/group``."""


class _MadeUp:
    """A few samples of nothing."""

    def __init__(self, example: Tensor, num_classes: int) -> None:
        self.size = _SAMPLES
        self.x = torch.zeros(_SAMPLES, *example.shape[1:], dtype=example.dtype)
        self.y = torch.arange(_SAMPLES) % num_classes
        self.label_counts = torch.bincount(self.y, minlength=num_classes)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[positions], self.y[positions]


def form_of(trainer: ClientTrainer, plan: RoundPlan, example: Tensor) -> Form:
    """What a client sends in this round.

    Args:
        trainer: The server's own copy of network and method; its weights are overwritten.
        plan: The round's plan.
        example: A batch of inputs as the network takes them; only its shape counts.
    """
    one_step = replace(plan.local, epochs=1, batch_size=_SAMPLES, drop_last=False, steps=None)
    data = _MadeUp(example, trainer.model.num_classes)
    result = trainer.train(replace(plan, local=one_step), 0, data, {})
    return {group: Blank.of(entry) for group, entry in result.sums.items()}


@dataclass(frozen=True)
class Expected:
    """What an update must be like to be added to the others."""

    run: str
    plan: RoundPlan
    form: Form
    recipe: Recipe
    norm_limit: float
    """The largest norm of the base part's mean update."""

    def check(self, reply: SiteResult, client: int, samples: int) -> None:
        """Refuse an update that is not what this client can have sent in this round.

        Args:
            reply: What came.
            client: Whom the plan was sent to.
            samples: How many samples that client holds, as it announced.

        Raises:
            BadMessageError: Says what is wrong.
        """
        if reply.run != self.run:
            raise BadMessageError(f"it belongs to another run ({reply.run!r})")
        if reply.round != self.plan.round:
            raise BadMessageError(f"it belongs to round {reply.round + 1}, not {self.plan.round + 1}")
        if reply.result.client != client:
            raise BadMessageError(f"it calls itself client {reply.result.client}, but the plan went to {client}")
        self._check_work(reply, samples)
        sums = reply.result.sums
        if unknown := sorted(sums.keys() - self.form.keys()):
            raise BadMessageError(f"unknown sums {', '.join(unknown)}")
        # A client without a step may have nothing to say beyond the base part's update.
        base = f"{self.recipe.parts[0].name}/"
        due = [group for group in self.form if reply.result.steps or self.plan.survey or group.startswith(base)]
        if missing := [group for group in due if group not in sums]:
            raise BadMessageError(f"missing sums {', '.join(missing)}")
        most = max(1, samples, reply.result.sample_steps)
        for group, entry in sums.items():
            self._check_group(group, entry, most)
            if group.startswith(base):
                self._check_norm(group, entry)

    def _check_work(self, reply: SiteResult, samples: int) -> None:
        """Steps and samples follow from the plan and the number of samples; nothing else is plausible."""
        steps, seen = (0, 0) if self.plan.survey else self.plan.local.work_on(samples)
        if (reply.result.steps, reply.result.sample_steps) != (steps, seen):
            raise BadMessageError(
                f"it tells of {reply.result.steps} steps over {reply.result.sample_steps} samples; a client with "
                f"{samples} samples makes {steps} over {seen}"
            )

    def _check_group(self, group: str, entry: WeightedSum, most: int) -> None:
        blank = self.form[group]
        if missing := sorted(blank.tensors.keys() - entry.tensors.keys()):
            raise BadMessageError(f"{group} lacks {', '.join(missing)}")
        for name, value in entry.tensors.items():
            if name not in blank.tensors:
                raise BadMessageError(f"{group} has an unknown tensor {name!r}")
            shape, dtype = blank.tensors[name]
            if value.shape != shape:
                raise BadMessageError(f"{group}:{name} has the shape {list(value.shape)}, not {list(shape)}")
            if value.dtype != dtype:
                raise BadMessageError(f"{group}:{name} is {value.dtype}, not {dtype}")
        if (broken := first_non_finite(entry.tensors)) is not None:
            raise BadMessageError(f"{group}:{broken} holds values that are not finite")
        weight = entry.weight
        if weight.shape != blank.weight or (not weight.is_floating_point() and weight.dtype != torch.int64):
            raise BadMessageError(f"the weight of {group} is {weight.dtype} {list(weight.shape)}")
        if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()):
            raise BadMessageError(f"the weight of {group} is negative or not finite")
        if float(weight.sum() if weight.dim() else weight) > most:
            raise BadMessageError(f"the weight of {group} is {float(weight.sum()):g}, more than its {most} samples")

    def _check_norm(self, group: str, entry: WeightedSum) -> None:
        squares = sum(float(value.double().square().sum()) for value in entry.tensors.values())
        weight = float(entry.weight.double().max())
        # Sums without weight are added to the others' all the same: nothing but zeros is harmless there.
        norm = math.sqrt(squares) / weight if weight else math.inf if squares else 0.0
        if norm > self.norm_limit:
            raise BadMessageError(
                f"the norm of {group} is {norm:.4g}, more than {self.norm_limit:g} (federation.norm_limit)"
            )


def largest_norm(asked: float, model: Mapping[str, Tensor]) -> float:
    """The limit for updates of a model: what was asked for; or where nothing was, what only nonsense exceeds.

    Example:
        >>> largest_norm(0, {"weight": torch.tensor([3.0, 4.0])})
        500.0
    """
    if asked:
        return asked
    return 100 * max(1.0, math.sqrt(sum(float(value.double().square().sum()) for value in model.values())))
