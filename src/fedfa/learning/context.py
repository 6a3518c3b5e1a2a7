"""What the hooks of a component receive: the task, a mini-batch, a client's context, the server's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional

from fedfa.checked_section import CheckedSection
from fedfa.errors import ConfigError
from fedfa.learning.aggregate import Aggregate
from fedfa.learning.batches import Labels
from fedfa.learning.tensors import ComponentTensors, Tensors, clone
from fedfa.models.split import SplitModel
from fedfa.trees import NetworkInput, to_device

if TYPE_CHECKING:
    from fedfa.learning.component import Component

ComponentT = TypeVar("ComponentT", bound="Component")

Optimiser = Literal["sgd", "adam", "adamw"]
"""Of the local training."""

Precision = Literal["float32", "bfloat16"]
"""Number format in which networks compute while they train. Weights, hooks, sums and evaluations stay float32."""


class Role(Enum):
    """What happens to one tensor of the model between rounds."""

    SHARED = "shared"
    """Sent to the clients, trained there, averaged by the server."""
    AVERAGED = "averaged"
    """Sent and averaged but not trained: statistics that the network gathers by itself (BatchNorm)."""
    LOCAL = "local"
    """Kept by each client; it never leaves the client."""
    FROZEN = "frozen"
    """Set once, never trained, not sent back."""

    @property
    def travels(self) -> bool:
        """Whether the tensor is exchanged with the server."""
        return self in (Role.SHARED, Role.AVERAGED)


def scheduled_factor(schedule: str, round: int, rounds: int) -> float:
    """The factor of the learning rate in one round of a schedule.

    Example:
        >>> [scheduled_factor("step:2:0.1", t, 6) for t in (0, 1, 2, 4)]
        [1.0, 1.0, 0.1, 0.010000000000000002]
        >>> [round(scheduled_factor("cosine", t, 4), 3) for t in range(4)]
        [1.0, 0.854, 0.5, 0.146]
    """
    kind, *values = schedule.split(":")
    try:
        if kind == "constant" and not values:
            return 1.0
        if kind == "step" and len(values) == 2:
            every, factor = int(values[0]), float(values[1])
            if every >= 1 and 0 < factor <= 1:
                return float(factor ** (round // every))
        if kind == "cosine" and len(values) <= 1:
            end = float(values[0]) if values else 0.0
            if 0 <= end <= 1:
                progress = min(round / max(rounds, 1), 1.0)
                return end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2
    except ValueError:
        pass
    raise ValueError(
        f'schedule {schedule!r}: write "constant", "step:EVERY:FACTOR" (as "step:50:0.1"), "cosine" or "cosine:END", '
        "with EVERY in rounds, FACTOR above 0 and at most 1, END from 0 to 1"
    )


class LocalTraining(CheckedSection):
    """How a client trains in a round.

    Example:
        >>> LocalTraining(epochs=1, lr=0.1, lr_decay=0.5).in_round(2).lr
        0.025
    """

    section: ClassVar[str] = "local"

    epochs: int = Field(5, ge=1)
    """Passes over a client's samples in a round."""
    batch_size: int = Field(64, ge=1)
    """Samples per optimiser step."""
    lr: float = Field(0.01, gt=0)
    """Learning rate of the local optimiser."""
    lr_decay: float = Field(1.0, gt=0, le=1)
    """The learning rate of round t (counted from 0) is ``lr · lr_decay^t``, times the schedule's factor."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD; it starts anew in every round."""
    weight_decay: float = Field(0.001, ge=0)
    """Added to the gradient as λ·w; with AdamW decoupled from it."""
    optimiser: Optimiser = "sgd"
    """``"sgd"``, ``"adam"`` or ``"adamw"``; its moments start at zero in each round."""
    schedule: str = "constant"
    """Of the learning rate over rounds: ``"constant"``, ``"step:EVERY:FACTOR"``, ``"cosine"`` (to 0) or
    ``"cosine:END"`` (to END times ``lr``)."""
    warmup: int = Field(0, ge=0)
    """Rounds over which the learning rate rises linearly to ``lr``; the schedule begins after them."""
    drop_last: bool = False
    """Skip an incomplete last batch (BatchNorm cannot train on a single sample)."""
    precision: Precision = "float32"
    """``"bfloat16"`` trains in reduced precision: faster where the processor supports it, with different results.
    Compare only runs of one precision. Weights, sums and evaluations stay float32."""
    steps: int | None = Field(None, ge=1)
    """Exactly this many optimiser steps per round, over as many epochs as they take; left out, ``epochs`` decides."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"local.{name} cannot be assigned; assign all of it: experiment.local = fedfa.LocalTraining({name}=…, …)"
        )

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, schedule: str) -> str:
        scheduled_factor(schedule, 0, 1)
        return schedule

    @field_validator("optimiser")
    @classmethod
    def _without_momentum(cls, optimiser: Optimiser, values: ValidationInfo) -> Optimiser:
        if optimiser != "sgd" and values.data.get("momentum"):
            raise ValueError("momentum belongs to SGD, and this optimiser has its own: set local.momentum = 0")
        return optimiser

    @property
    def uses_horizon(self) -> bool:
        """Whether the learning rate depends on the planned number of rounds."""
        return self.schedule.startswith("cosine")

    def in_round(self, round: int, rounds: int | None = None) -> LocalTraining:
        """The settings of one round, counted from 0, with its learning rate.

        Args:
            round: The round.
            rounds: The planned number of rounds, which a cosine schedule needs.
        """
        rate = self.lr * self.lr_decay**round
        if round < self.warmup:
            rate *= (round + 1) / self.warmup
        elif self.schedule != "constant":
            if self.uses_horizon and rounds is None:
                raise ConfigError(f"local.schedule = {self.schedule!r} needs the planned number of rounds")
            rate *= scheduled_factor(self.schedule, round - self.warmup, (rounds or 1) - self.warmup)
        return self.model_copy(update={"lr": rate, "lr_decay": 1.0, "schedule": "constant", "warmup": 0})

    def batches_on(self, size: int) -> int:
        """Batches in an epoch over this many samples."""
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def steps_on(self, size: int) -> int:
        """Optimiser steps of a client with this many samples."""
        return self.epochs * self.batches_on(size) if self.steps is None else self.steps

    def work_on(self, size: int) -> tuple[int, int]:
        """Optimiser steps, and samples processed in them, of a client with this many samples.

        Example:
            >>> LocalTraining(epochs=2, batch_size=4).work_on(10)
            (6, 20)
        """
        batches = self.batches_on(size)
        processed = batches * self.batch_size if self.drop_last else size
        if self.steps is None:
            return self.epochs * batches, self.epochs * processed
        whole, rest = divmod(self.steps, batches) if batches else (0, 0)
        return whole * batches + rest, whole * processed + min(rest * self.batch_size, processed)


@dataclass(frozen=True)
class Task:
    """What the server knows before the first round. ``model`` holds the initial weights."""

    model: SplitModel
    num_classes: int
    num_clients: int
    rounds: int
    """The planned number of rounds, for schedules that need the horizon."""
    local: LocalTraining | None = None
    """How clients train in the first round, where that is known beforehand."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    """Role of each tensor of the model; empty while the components are asked for roles."""

    @property
    def feature_dim(self) -> int:
        """Width of the features that enter the classifier."""
        return self.model.feature_dim


@dataclass(slots=True)
class Batch:
    """One mini-batch in the local step."""

    x: NetworkInput
    y: Tensor
    index: Tensor
    """Positions of these samples in the client's own data (for anything computed once per sample)."""
    features: Tensor
    """Input of the linear classifier, with its graph."""
    logits: Tensor
    outputs: Tensors = field(default_factory=dict)
    """Outputs of the modules that components named in :attr:`Component.outputs`, with their graph."""
    place: tuple[Labels, int] | None = None
    """The labels of all batches that were fetched together, and the position of this batch among them."""

    def class_counts(self) -> Tensor:
        """For each sample the number of samples of its class in the batch, ``[…, B, 1]``."""
        labels, number = self.place or (Labels(self.y, self.y.shape[-1], int(self.y.max()) + 1), 0)
        return labels.class_counts(number, self.features.dtype)


@dataclass
class ClientContext:
    """Everything a component may read and change on a client during one round."""

    client: int
    round: int
    """Counted from 0."""
    rounds: int
    """The planned number of rounds; a component that reads it declares ``Traits(horizon=True)``."""
    model: SplitModel
    parameters: dict[str, nn.Parameter]
    """The live parameters that are trained and shared, by name; without those that stay on the client."""
    start: Tensors
    """The weights this round started from, by name; read only."""
    broadcast: ComponentTensors
    """What the server sent of each component's state."""
    client_state: ComponentTensors
    """What each component keeps on this client between rounds; stored after the round."""
    local: LocalTraining
    size: int
    """Number of samples of the client."""
    num_classes: int
    batches_per_epoch: int
    count_labels: Callable[[], Tensor]
    """Computes :attr:`label_counts`."""
    make_rng: Callable[[], np.random.Generator]
    """Creates :attr:`rng`."""
    data: Any = None
    """The client's samples (``size``, ``label_counts``, ``batch(positions)``), for an extra pass over them."""
    components: Mapping[str, Component] = field(default_factory=dict)
    """All components of the algorithm by name; see :meth:`component`."""
    epoch: int = 0
    last_epoch: bool = False
    """Whether this is the last local epoch of the round."""
    steps: int = 0
    """Optimiser steps done so far in this round."""
    scratch: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Working memory of each component, for this round only."""
    update: Tensors = field(default_factory=dict)
    """After local training: trained minus received weights, for every tensor that goes to the server."""
    compute_gradients: Callable[[Batch], Tensor] | None = None
    """Implements :meth:`recompute_gradients`."""
    earlier_gradient_hooks: Sequence[Callable[..., Any]] = ()
    """Hooks ``gradient`` that have been called for this batch; :meth:`recompute_gradients` calls them again."""

    @cached_property
    def label_counts(self) -> Tensor:
        """The client's samples of each class, ``[C]``; counted on first use."""
        return self.count_labels()

    @cached_property
    def rng(self) -> np.random.Generator:
        """A random stream of this client and round, for components that draw; created on first use."""
        return self.make_rng()

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return self.model.head.weight.device

    def component(self, kind: type[ComponentT]) -> ComponentT:
        """Another component of the algorithm, to read its options."""
        found = self.components[kind.name]
        assert isinstance(found, kind)
        return found

    def recompute_gradients(self, batch: Batch) -> Tensor:
        """Evaluate the whole local loss again at the current weights, and replace the gradients by its gradients.

        The loss holds the terms of every component, and what earlier components' hooks ``gradient`` do to the gradients
        is done again. For the hook ``gradient``: sharpness-aware methods move the weights, recompute, and move them
        back.

        Returns:
            The loss, detached.
        """
        if self.compute_gradients is None:
            raise RuntimeError("recompute_gradients works in the hook `gradient` only, for one client at a time")
        return self.compute_gradients(batch)

    def features(self, weights: Tensors | None = None, batch_size: int = 500) -> Tensor:
        """Features of all the client's samples, ``[size, d]``: one pass in evaluation mode, without a graph.

        Args:
            weights: Weights to use instead of the network's current ones (which are restored afterwards).
            batch_size: Samples per forward pass.
        """
        module = self.model.module
        own, was_training = clone(self.model.state()) if weights is not None else None, module.training
        self.model.load(weights or {})
        module.eval()
        device = self.device
        with torch.no_grad():
            chunks = [
                self.model(to_device(self.data.batch(positions)[0], device))[0]
                for positions in torch.split(torch.arange(self.size), batch_size)
            ]
        module.train(was_training)
        self.model.load(own or {})
        return torch.cat(chunks) if chunks else self.model.head.weight.new_zeros(0, self.model.feature_dim)

    def logits(self, weights: Tensors | None = None) -> Tensor:
        """Logits of all the client's samples, ``[size, C]``, in the order of :meth:`features`; without a graph.

        Args:
            weights: Weights to use instead of the network's current ones, e.g. those of another model.
        """
        head = self.model.head
        names = self.model.head_tensors
        own = [tensor.detach() for tensor in (head.weight, head.bias) if tensor is not None]
        return functional.linear(self.features(weights), *(own if weights is None else [weights[n] for n in names]))

    def labels(self) -> Tensor:
        """Labels of all the client's samples, in the order of :meth:`features`."""
        chunks = [self.data.batch(positions)[1] for positions in torch.split(torch.arange(self.size), 500)]
        return torch.cat(chunks).to(self.device) if chunks else self.label_counts.new_zeros(0)


@dataclass
class ServerStep:
    """Everything a component may read and change when the aggregate of a round is complete."""

    round: int
    model: Tensors
    """The model that is evaluated, and sent unless a component is ahead of it; read only: change ``update`` instead."""
    state: ComponentTensors
    """Each component's server state; a component changes its own."""
    aggregate: Aggregate
    num_clients: int
    """Clients in the federation (not only in this cohort)."""
    roles: Mapping[str, Role]
    """Role of each tensor of the model."""
    rng: np.random.Generator
    """A random stream of this round, for components that draw."""
    update: Tensors = field(default_factory=dict)
    """What is added to the model after the last component's step: the aggregating component sets it, later ones
    transform it."""

    @property
    def trained(self) -> list[str]:
        """Names in ``update`` that clients train; a server optimiser acts on these, not on statistics."""
        return [name for name in self.update if self.roles[name] is Role.SHARED]
