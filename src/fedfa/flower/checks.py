"""Validation of site updates before aggregation.

The server learns what an update must look like by acting as a client: it makes one local step on dummy samples with the
round's own plan, through the same local loop as the sites. Names, shapes and dtypes of the result are the *spec* that
every update must match. No algorithm has to describe itself, so custom components are checked like built-in ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfa.flower.messages import BadMessageError, SiteResult
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import ClientTrainer, RoundPlan
from fedfa.learning.tensors import first_non_finite

_SAMPLES = 4
"""Enough for BatchNorm."""


@dataclass(frozen=True)
class GroupSpec:
    """Names, shapes and dtypes of one group of weighted sums, and the shape of its weight."""

    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    weight: torch.Size

    @classmethod
    def of(cls, entry: WeightedSum) -> GroupSpec:
        """Spec of these sums."""
        tensors = {name: (value.shape, value.dtype) for name, value in entry.tensors.items()}
        return cls(tensors, entry.weight.shape)


ContributionSpec = Mapping[str, GroupSpec]
"""Spec of a client's contribution, by ``component/group``."""


class _DummySamples:
    """A few zero inputs."""

    def __init__(self, example: Tensor, num_classes: int) -> None:
        self.size = _SAMPLES
        self.x = torch.zeros(_SAMPLES, *example.shape[1:], dtype=example.dtype)
        self.y = torch.arange(_SAMPLES) % num_classes
        self.label_counts = torch.bincount(self.y, minlength=num_classes)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[positions], self.y[positions]


def contribution_spec(trainer: ClientTrainer, plan: RoundPlan, example: Tensor) -> ContributionSpec:
    """Derive the spec of a client's contribution to this round.

    Args:
        trainer: The server's own copy of network and algorithm; its weights are overwritten.
        plan: The round's plan.
        example: A batch of network inputs; only the shape and dtype matter.
    """
    one_step = plan.local.model_copy(update={"epochs": 1, "batch_size": _SAMPLES, "drop_last": False, "steps": None})
    data = _DummySamples(example, trainer.model.num_classes)
    result = trainer.train(replace(plan, local=one_step), 0, data, {})
    return {group: GroupSpec.of(entry) for group, entry in result.contribution.items()}


@dataclass(frozen=True)
class UpdateValidator:
    """Checks that an update can be aggregated."""

    run: str
    plan: RoundPlan
    spec: ContributionSpec
    algorithm: Algorithm
    norm_limit: float
    """Largest L2 norm of the base component's mean update."""

    def check(self, reply: SiteResult, client: int, samples: int) -> None:
        """Reject an update that this client cannot have sent in this round.

        Raises:
            BadMessageError: The update is invalid; the message says why.
        """
        if reply.run != self.run:
            raise BadMessageError(f"it belongs to another run ({reply.run!r})")
        if reply.round != self.plan.round:
            raise BadMessageError(f"it belongs to round {reply.round + 1}, not {self.plan.round + 1}")
        if reply.result.client != client:
            raise BadMessageError(f"it is from client {reply.result.client}, but the plan went to client {client}")
        self._check_work(reply, samples)
        contribution = reply.result.contribution
        if unknown := sorted(contribution.keys() - self.spec.keys()):
            raise BadMessageError(f"unknown groups {', '.join(unknown)}")
        # A client that made no step may contribute nothing beyond the base component's update.
        base = f"{self.algorithm.components[0].name}/"
        due = [group for group in self.spec if reply.result.steps or self.plan.final_pass or group.startswith(base)]
        if missing := [group for group in due if group not in contribution]:
            raise BadMessageError(f"missing groups {', '.join(missing)}")
        largest_weight = max(1, samples, reply.result.sample_steps)
        for group, entry in contribution.items():
            self._check_group(group, entry, largest_weight)
            if group.startswith(base):
                self._check_norm(group, entry)

    def _check_work(self, reply: SiteResult, samples: int) -> None:
        """Steps and processed samples follow from the plan and the number of samples."""
        expected = (0, 0) if self.plan.final_pass else self.plan.local.work_on(samples)
        if (reply.result.steps, reply.result.sample_steps) != expected:
            raise BadMessageError(
                f"it reports {reply.result.steps} steps over {reply.result.sample_steps} samples; a client with "
                f"{samples} samples makes {expected[0]} over {expected[1]}"
            )

    def _check_group(self, group: str, entry: WeightedSum, largest_weight: int) -> None:
        spec = self.spec[group]
        if missing := sorted(spec.tensors.keys() - entry.tensors.keys()):
            raise BadMessageError(f"{group} lacks {', '.join(missing)}")
        for name, value in entry.tensors.items():
            if name not in spec.tensors:
                raise BadMessageError(f"{group} has an unknown tensor {name!r}")
            shape, dtype = spec.tensors[name]
            if value.shape != shape:
                raise BadMessageError(f"{group}:{name} has shape {list(value.shape)}, not {list(shape)}")
            if value.dtype != dtype:
                raise BadMessageError(f"{group}:{name} is {value.dtype}, not {dtype}")
        if (broken := first_non_finite(entry.tensors)) is not None:
            raise BadMessageError(f"{group}:{broken} holds values that are not finite")
        weight = entry.weight
        if weight.shape != spec.weight or (not weight.is_floating_point() and weight.dtype != torch.int64):
            raise BadMessageError(f"the weight of {group} is {weight.dtype} {list(weight.shape)}")
        if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()):
            raise BadMessageError(f"the weight of {group} is negative or not finite")
        if float(weight.sum()) > largest_weight:
            raise BadMessageError(
                f"the weight of {group} is {float(weight.sum()):g}, more than its {largest_weight} samples"
            )

    def _check_norm(self, group: str, entry: WeightedSum) -> None:
        squares = sum(float(value.double().square().sum()) for value in entry.tensors.values())
        weight = float(entry.weight.double().max())
        # Sums with zero weight are aggregated too, so they must be zero.
        norm = math.sqrt(squares) / weight if weight else math.inf if squares else 0.0
        if norm > self.norm_limit:
            raise BadMessageError(
                f"the norm of {group} is {norm:.4g}, more than {self.norm_limit:g} (federation.norm_limit)"
            )


def resolve_norm_limit(configured: float, model: Mapping[str, Tensor]) -> float:
    """Norm limit for updates of a model: the configured one, or a generous default if that is 0.

    Example:
        >>> resolve_norm_limit(0, {"weight": torch.tensor([3.0, 4.0])})
        500.0
    """
    if configured:
        return configured
    return 100 * max(1.0, math.sqrt(sum(float(value.double().square().sum()) for value in model.values())))
