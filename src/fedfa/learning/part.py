"""The one interface every method plugs into.

A federated method is a *recipe of parts*. A part names the places where the method differs from plain federated
training, and nothing else; each hook below is one such place, and each has a default that does nothing. A hook that a
part does not override costs nothing: the recipe only calls those that exist.

Order of events in one round::

    server   broadcast
    client     begin
                 per batch:  logits → loss → gradient → (optimiser step) → after_step
               after_epoch
             end → contribute
    server   step            (sees the total of all contributions)

Hooks of the client see tensors that may carry one extra leading axis, the clients of a stacked execution. They
reduce over trailing axes only (``.sum(-1)``, ``.mean(-1)``, ``@``), so one text serves both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedfa.learning.sums import Total, WeightedSum
from fedfa.learning.tensors import PartTensors, Tensors
from fedfa.models.split import SplitModel


class Options(BaseModel):
    """Base of the typed options of a part: frozen, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoOptions(Options):
    """For parts that have nothing to choose."""


class Role(Enum):
    """What happens to one tensor of the model between rounds."""

    SHARED = "shared"
    """Sent to the clients, trained there, averaged by the server."""
    LOCAL = "local"
    """Each client keeps its own; it never leaves the client."""
    FROZEN = "frozen"
    """Set once, never trained, not sent back."""


@dataclass(frozen=True)
class Task:
    """What the server knows before the first round.

    ``model`` holds the initial weights. ``rounds`` is the planned number (for schedules that need the horizon).
    """

    model: SplitModel
    num_classes: int
    num_clients: int
    rounds: int

    @property
    def feature_dim(self) -> int:
        """Width of the features that enter the classifier."""
        return self.model.feature_dim


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round. ``lr`` is this round's learning rate, decay included."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    drop_last: bool = False


@dataclass(slots=True)
class Batch:
    """One mini-batch on its way through the local step."""

    x: Tensor
    y: Tensor
    index: Tensor
    """Positions of these samples in the client's own data (for anything computed once per sample)."""
    features: Tensor
    """What enters the linear classifier, with its graph."""
    logits: Tensor


@dataclass
class ClientContext:
    """Everything a part may see and change on a client during one round."""

    client: int
    round: int
    """Counted from 0."""
    model: SplitModel
    start: Tensors
    """The weights this round started from, by name; read only."""
    received: PartTensors
    """What each part broadcast."""
    kept: PartTensors
    """What each part keeps on this client between rounds; change it freely, it is stored after the round."""
    local: LocalTraining
    size: int
    label_counts: Tensor
    num_classes: int
    rng: np.random.Generator
    """A stream of its own for this client and round, for parts that draw."""
    batches_per_epoch: int
    data: Any = None
    """The client's samples (``size``, ``label_counts``, ``batch(positions)``), for parts that need a pass over them."""
    epoch: int = 0
    steps: int = 0
    """Optimiser steps done so far in this round."""
    scratch: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per part, lives only during this round."""
    update: Tensors = field(default_factory=dict)
    """After local training: trained minus received weights, for every shared tensor."""


@dataclass
class ServerStep:
    """Everything a part may see and change when the round's total is complete."""

    round: int
    model: Tensors
    """The model that was sent out; read only: change ``update`` instead."""
    state: PartTensors
    """Each part's server state; a part changes its own."""
    total: Total
    num_clients: int
    """Clients in the federation (not only in this cohort)."""
    update: Tensors = field(default_factory=dict)
    """What will be added to the model after the last part's step; the base part sets it, later ones transform it."""


OptionsT = TypeVar("OptionsT", bound=Options)


class Part(Generic[OptionsT]):
    """One ingredient of a method. Override the hooks you need; see the module's text for when each is called.

    A part holds only its options. Whatever changes lives in the context's or the server's named tensors.
    """

    name: ClassVar[str]
    """Names the part's options, state and contributions."""
    options_type: ClassVar[type[Options]] = NoOptions
    requires: ClassVar[tuple[str, ...]] = ()
    """Names of parts that must stand before this one in the recipe."""
    base: ClassVar[bool] = False
    """A base part turns the cohort's updates into ``server.update``; a recipe has exactly one."""
    needs_each: ClassVar[bool] = False
    """True if the server's step must see each client's sums, not only their total."""

    def __init__(self, options: OptionsT | None = None) -> None:
        # A part's ``options_type`` is its OptionsT; a class variable cannot be declared of that type.
        self.options: OptionsT = options if options is not None else self.options_type()  # type: ignore[assignment]

    # -- server, before training ------------------------------------------------------------------------------
    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """This part's server state before the first round."""
        return {}

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Roles of tensors of the model that differ from ``SHARED``, by name."""
        return {}

    # -- server, each round -----------------------------------------------------------------------------------
    def broadcast(self, state: Tensors, round: int) -> Tensors:
        """What the clients receive of this part's state."""
        return state

    def step(self, server: ServerStep) -> None:
        """Take part in the server's step: update ``server.state[self.name]``, set or transform ``server.update``."""

    # -- client -----------------------------------------------------------------------------------------------
    def begin(self, ctx: ClientContext) -> None:
        """Before local training."""

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        """Transform the logits that enter the cross-entropy."""
        return logits

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Transform the loss: add a term, weigh it."""
        return loss

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """After the backward pass, before the optimiser's step: change the gradients in place."""

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """After each optimiser step; ``batch`` still holds the features of the forward pass."""

    def after_epoch(self, ctx: ClientContext) -> None:
        """After each local epoch."""

    def end(self, ctx: ClientContext) -> None:
        """After local training: the last moment at which the model may be changed."""

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """What goes to the server, by group; ``ctx.update`` is known."""
        return {}


HOOKS: tuple[str, ...] = (
    "begin", "logits", "loss", "gradient", "after_step", "after_epoch", "end",
)  # fmt: skip


def overridden(part: Part[Any], hook: str) -> Callable[..., Any] | None:
    """The bound hook if the part defines it, else None."""
    return getattr(part, hook) if getattr(type(part), hook) is not getattr(Part, hook) else None
