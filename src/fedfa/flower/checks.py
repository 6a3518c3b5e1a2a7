"""Validation of site updates before aggregation.

The server learns what an update must look like by acting as a client: it makes one local step on dummy samples with the
round's own plan, through the same local loop as the sites. Names, shapes and dtypes of the result are the *spec* that
every update must match. No algorithm has to describe itself, so custom components are checked like built-in ones.

What one site can do is bounded: the norm of every mean that it sends, the weight by its samples, sums without weight to
zero, and its share of the cohort's samples (:func:`limit_share`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfa.flower.messages import BadMessageError, SiteResult
from fedfa.learning.aggregate import Contribution, WeightedSum
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.client import ClientTrainer, RoundPlan
from fedfa.learning.tensors import first_non_finite
from fedfa.trees import NetworkInput, each_tensor

_SAMPLES = 4
"""Enough for BatchNorm."""
_OTHERS_FACTOR = 1e4
"""How far the norm of a mean that is not the model's update may exceed every scale that the server knows. Generous,
because squares of features (CCVR) are among them: it stops values that end a training, not subtle ones."""


@dataclass(frozen=True)
class GroupSpec:
    """Names, shapes and dtypes of one group of weighted sums, the shape of its weight, and the norm of its mean."""

    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    weight: torch.Size
    norm: float

    @classmethod
    def of(cls, entry: WeightedSum) -> GroupSpec:
        """Spec of these sums."""
        tensors = {name: (value.shape, value.dtype) for name, value in entry.tensors.items()}
        return cls(tensors, entry.weight.shape, norm_of_mean(entry))


def norm_of_mean(entry: WeightedSum) -> float:
    """L2 norm of the mean that weighted sums stand for.

    Example:
        >>> norm_of_mean(WeightedSum.of({"a": torch.tensor([3.0, 4.0])}, 7))
        5.0
    """
    divisor = torch.where(entry.weight == 0, 1.0, entry.weight).double()
    return _norm({name: value.double() / divisor for name, value in entry.tensors.items()})


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors.values()))


def limit_share(contribution: Contribution, samples: int, others: int, share: float) -> tuple[Contribution, float]:
    """The contribution of a site, with weights as if it had no more than this share of the cohort's samples.

    Args:
        contribution: What the site sent; means stay as they are.
        samples: Number of samples of the site.
        others: Number of samples of the other sites of the cohort.
        share: Largest share of the total.

    Returns:
        The contribution, and the factor by which its weights were reduced.

    Example:
        >>> limited, factor = limit_share({"a/b": WeightedSum.of({"x": torch.ones(1)}, 90)}, 90, 30, 0.5)
        >>> limited["a/b"].weight, limited["a/b"].tensors["x"], round(factor, 3)
        (tensor(30.), tensor([30.]), 0.333)
    """
    most = others * share / (1 - share) if share < 1 else math.inf
    if samples <= most or not others:
        return contribution, 1.0
    factor = most / samples
    # Weights that do not count samples (one per client) are bounded already.
    return {
        group: WeightedSum({name: value * factor for name, value in entry.tensors.items()}, entry.weight * factor)
        if float(entry.weight.sum()) >= min(samples, 2)
        else entry
        for group, entry in contribution.items()
    }, factor


ContributionSpec = Mapping[str, GroupSpec]
"""Spec of a client's contribution, by ``component/group``."""


class _DummySamples:
    """A few inputs of the scale of normalised data."""

    def __init__(self, example: NetworkInput, num_classes: int) -> None:
        self.size = _SAMPLES
        draw = torch.Generator().manual_seed(0)

        def dummy(one: Tensor) -> Tensor:
            shape = (_SAMPLES, *one.shape[1:])
            return (torch.randn(shape, generator=draw) if one.is_floating_point() else torch.zeros(shape)).to(one.dtype)

        self.x = each_tensor(example, dummy)
        self.y = torch.arange(_SAMPLES) % num_classes
        self.label_counts = torch.bincount(self.y, minlength=num_classes)

    def batch(self, positions: Tensor) -> tuple[NetworkInput, Tensor]:
        return each_tensor(self.x, lambda one: one[positions]), self.y[positions]


def contribution_spec(trainer: ClientTrainer, plan: RoundPlan, example: NetworkInput) -> ContributionSpec:
    """Derive the spec of a client's contribution to this round.

    Args:
        trainer: The server's own copy of network and algorithm; its weights are overwritten.
        plan: The round's plan.
        example: A batch of network inputs; only the shape and dtype matter.

    Raises:
        ClientError: No client can train from here: values are not finite.
    """
    # A tiny step: one that diverges tells of the plan, not of the dummy samples.
    tiny = {"epochs": 1, "batch_size": _SAMPLES, "drop_last": False, "steps": None, "lr": 1e-6}
    one_step = plan.local.model_copy(update=tiny)
    data = _DummySamples(example, trainer.model.num_classes)
    result = trainer.train(replace(plan, local=one_step), 0, data, {})
    return {group: GroupSpec.of(entry) for group, entry in result.contribution.items()}


def spec_nbytes(spec: ContributionSpec) -> int:
    """Bytes of the tensors of a contribution."""
    shapes = [one for group in spec.values() for one in [*group.tensors.values(), (group.weight, torch.float64)]]
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes)


@dataclass(frozen=True)
class UpdateValidator:
    """Checks that an update can be aggregated."""

    run: str
    plan: RoundPlan
    spec: ContributionSpec
    algorithm: Algorithm
    norm_limit: float
    """Largest L2 norm of the base component's mean update; infinite: no limit on any norm."""

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
            self._check_norm(group, entry, is_base=group.startswith(base))

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

    def _check_norm(self, group: str, entry: WeightedSum, *, is_base: bool) -> None:
        # Sums with zero weight are aggregated too, so they must be zero.
        for name, value in entry.tensors.items():
            if bool(((entry.weight == 0) & (value != 0)).any()):
                raise BadMessageError(f"{group}:{name} has sums without weight")
        norm, limit = norm_of_mean(entry), self.norm_limit
        if not is_base and math.isfinite(limit):
            own = self.spec[group].norm
            known = (1.0, own if math.isfinite(own) else 1.0, _norm(self.plan.model))
            component = self.plan.broadcast.get(group.split("/", 1)[0], {})
            limit = _OTHERS_FACTOR * max(*known, _norm(component))
        if not norm <= limit:
            raise BadMessageError(f"the norm of {group} is {norm:.4g}, more than {limit:g} (federation.norm_limit)")


def resolve_norm_limit(configured: float, model: Mapping[str, Tensor]) -> float:
    """Norm limit for updates of a model: the configured one, or a generous default if that is 0.

    Example:
        >>> resolve_norm_limit(0, {"weight": torch.tensor([3.0, 4.0])})
        500.0
    """
    if configured:
        return configured
    return 100 * max(1.0, _norm(model))
