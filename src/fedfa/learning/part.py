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

Before the first round: ``adapt`` (the network), ``init`` (server state), ``roles``, ``check``. In evaluations:
``predict``. After the last round, for parts that have one, a survey: ``survey`` on every client, ``conclude`` on the
server.

Clients can train side by side, as one network with a leading client axis (:mod:`fedfa.learning.stacking`). Then the
hooks that run per batch and per epoch see tensors with that axis, and what ``begin`` put into ``ctx.scratch`` has it
too; if they reduce over trailing axes only (``.sum(-1)``, ``.mean(-1)``, ``@``), one text serves both forms. A part
whose hooks do says so with ``stacks``. All other hooks are always called for one client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from fedfa.learning.batches import Labels
from fedfa.learning.sums import Total, WeightedSum
from fedfa.learning.tensors import PartTensors, Tensors, clone
from fedfa.models.split import SplitModel


class Options(BaseModel):
    """Base of the typed options of a part: frozen, unknown names refused.

    The text under an option is what `fedfa algorithms NAME` says about it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NoOptions(Options):
    """For parts that have nothing to choose."""


class Role(Enum):
    """What happens to one tensor of the model between rounds."""

    SHARED = "shared"
    """Sent to the clients, trained there, averaged by the server."""
    AVERAGED = "averaged"
    """Sent and averaged, but not trained: statistics that the network gathers by itself (BatchNorm)."""
    LOCAL = "local"
    """Each client keeps its own; it never leaves the client."""
    FROZEN = "frozen"
    """Set once, never trained, not sent back."""

    @property
    def travels(self) -> bool:
        """Whether the tensor goes to the server and back."""
        return self in (Role.SHARED, Role.AVERAGED)


Precision = Literal["float32", "bfloat16"]
"""In which numbers networks compute while they train. Weights, hooks, sums and evaluations are as exact in both."""


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round. ``lr`` is this round's learning rate, decay included."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    drop_last: bool = False
    precision: Precision = "float32"
    steps: int | None = None
    """Exactly so many optimiser steps, over as many epochs as that takes; left out, ``epochs`` decides."""

    def steps_on(self, size: int) -> int:
        """Optimiser steps a client with so many samples makes in its epochs."""
        return self.epochs * self.batches_on(size)

    def batches_on(self, size: int) -> int:
        """Batches of an epoch over so many samples."""
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def work_on(self, size: int) -> tuple[int, int]:
        """Optimiser steps, and samples seen in them, of a client with so many samples.

        Example:
            >>> LocalTraining(epochs=2, batch_size=4, lr=0.1, momentum=0, weight_decay=0).work_on(10)
            (6, 20)
        """
        batches = self.batches_on(size)
        seen = batches * self.batch_size if self.drop_last else size
        if self.steps is None:
            return self.epochs * batches, self.epochs * seen
        whole, rest = divmod(self.steps, batches) if batches else (0, 0)
        return whole * batches + rest, whole * seen + min(rest * self.batch_size, seen)


@dataclass(frozen=True)
class Task:
    """What the server knows before the first round.

    ``model`` holds the initial weights. ``rounds`` is the planned number (for schedules that need the horizon).
    """

    model: SplitModel
    num_classes: int
    num_clients: int
    rounds: int
    local: LocalTraining | None = None
    """How clients train in the first round, where that is known beforehand."""

    @property
    def feature_dim(self) -> int:
        """Width of the features that enter the classifier."""
        return self.model.feature_dim


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
    outputs: Tensors = field(default_factory=dict)
    """Outputs of the modules that parts asked to watch, with their graph."""
    known: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors of the graph, with what a term of the loss adds to their gradient; see :meth:`add_gradient`."""
    place: tuple[Labels, int] | None = None
    """The labels of all batches that were fetched with this one, and which of them it is."""

    def add_gradient(self, of: Tensor, gradient: Tensor) -> None:
        """For a term of the loss whose gradient has a closed form: let the backward pass start from it as well.

        The hook ``loss`` then adds the value of the term without a graph, which saves the way back through it.

        Args:
            of: The features, or another tensor with a graph; one without is not trained and is left alone.
            gradient: Of the term with respect to it.

        Raises:
            ValueError: Their shapes differ; the backward pass would add up what has too many dimensions.
        """
        if of.shape != gradient.shape:
            raise ValueError(f"a gradient of shape {tuple(gradient.shape)} for a tensor of {tuple(of.shape)}")
        if of.requires_grad:
            self.known.append((of, gradient))

    def class_weights(self, of_a_class: float) -> Tensor:
        """Weights of the samples, ``[…, B, 1]``: those of each class that is here add up to ``of_a_class``."""
        labels, number = self.place or (Labels(self.y, self.y.shape[-1], int(self.y.max()) + 1), 0)
        return labels.class_weights(number, of_a_class, self.features.dtype)


@dataclass
class ClientContext:
    """Everything a part may see and change on a client during one round."""

    client: int
    round: int
    """Counted from 0."""
    rounds: int
    """The planned number of rounds; a part that reads it says so with ``uses_horizon``."""
    model: SplitModel
    parameters: dict[str, nn.Parameter]
    """The live parameters that are trained and shared, by name. Those that stay on the client are not among them."""
    start: Tensors
    """The weights this round started from, by name; read only."""
    received: PartTensors
    """What each part broadcast."""
    kept: PartTensors
    """What each part keeps on this client between rounds; change it freely, it is stored after the round."""
    local: LocalTraining
    size: int
    count_labels: Callable[[], Tensor]
    """Makes :attr:`label_counts`."""
    num_classes: int
    draws: Callable[[], np.random.Generator]
    """Makes :attr:`rng`."""
    batches_per_epoch: int
    data: Any = None
    """The client's samples (``size``, ``label_counts``, ``batch(positions)``), for parts that need a pass over them."""
    epoch: int = 0
    steps: int = 0
    """Optimiser steps done so far in this round."""
    scratch: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per part, lives only during this round."""
    update: Tensors = field(default_factory=dict)
    """After local training: trained minus received weights, for every tensor that goes to the server."""

    @cached_property
    def label_counts(self) -> Tensor:
        """The client's samples of each class, ``[C]``; counted when they are asked for."""
        return self.count_labels()

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return self.model.head.weight.device

    @cached_property
    def rng(self) -> np.random.Generator:
        """A stream of its own for this client and round, for parts that draw; made when it is asked for."""
        return self.draws()

    def features(self, weights: Tensors | None = None, batch_size: int = 500) -> Tensor:
        """The features of all the client's samples, ``[size, d]``: one pass in evaluation mode, without a graph.

        Args:
            weights: Weights to use instead of the network's present ones (which are put back afterwards).
            batch_size: Samples at a time.
        """
        module = self.model.module
        own, was_training = clone(self.model.state()) if weights is not None else None, module.training
        self.model.load(weights or {})
        module.eval()
        device = self.device
        with torch.no_grad():
            chunks = [
                self.model(self.data.batch(positions)[0].to(device))[0]
                for positions in torch.split(torch.arange(self.size), batch_size)
            ]
        module.train(was_training)
        self.model.load(own or {})
        return torch.cat(chunks) if chunks else self.model.head.weight.new_zeros(0, self.model.feature_dim)

    def labels(self) -> Tensor:
        """The labels of all the client's samples, in the order of :meth:`features`."""
        chunks = [self.data.batch(positions)[1] for positions in torch.split(torch.arange(self.size), 500)]
        return torch.cat(chunks).to(self.device) if chunks else self.label_counts.new_zeros(0)


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
    roles: Mapping[str, Role]
    """Role of each tensor of the model."""
    rng: np.random.Generator
    """A stream of its own for this round, for parts that draw."""
    update: Tensors = field(default_factory=dict)
    """What will be added to the model after the last part's step; the base part sets it, later ones transform it."""

    @property
    def trained(self) -> list[str]:
        """Names in ``update`` that clients train: a server's optimiser acts on these, not on statistics."""
        return [name for name in self.update if self.roles[name] is Role.SHARED]


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
    slot: ClassVar[str | None] = None
    """Names a place that only one part of a recipe can have, e.g. ``"server optimiser"``."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Parts or slots it cannot stand beside, with the reason."""
    needs_shared_model: ClassVar[bool] = False
    """True if it acts on what clients share: refused where every tensor that is trained stays with its client."""
    uses_horizon: ClassVar[bool] = False
    """True if what happens depends on the planned number of rounds: such a run cannot be made longer afterwards."""
    contributes_update_only: ClassVar[bool] = False
    """True if ``contribute`` looks at ``ctx.update`` and counters, not at ``ctx.model``: then the weights of clients
    that trained side by side are not copied into the network for it. Holds for the ``contribute`` of its class."""
    pools_data: ClassVar[bool] = False
    """True if there are no clients: one site holds all the data and makes as many steps as the cohort would."""

    def __init__(self, options: OptionsT | None = None) -> None:
        # A part's ``options_type`` is its OptionsT; a class variable cannot be declared of that type.
        self.options: OptionsT = options if options is not None else self.options_type()  # type: ignore[assignment]

    def stacks(self) -> bool:
        """Whether the hooks of batches and epochs work with a leading client axis; not asked if there are none.

        They read and change ``ctx.scratch`` (tensors only, made anew and not views of the network), ``ctx.parameters``
        and ``ctx.model``; they read ``ctx.received``, ``ctx.label_counts`` and counters; nothing else of the context,
        and no ``batch.outputs``. What ``stacks`` says holds for the hooks of its class: a subclass that replaces one
        says so itself.
        """
        return False

    # -- server, before training ------------------------------------------------------------------------------
    def adapt(self, model: SplitModel, rng: np.random.Generator) -> SplitModel:
        """The network to train, made from the one that was asked for (e.g. with another classifier)."""
        return model

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """This part's server state before the first round."""
        return {}

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Roles of tensors of the model that differ from ``SHARED``, by name."""
        return {}

    def check(self, task: Task, roles: Mapping[str, Role]) -> None:
        """Raise :class:`~fedfa.errors.RecipeError` if the method cannot work with this task."""

    def watches(self) -> Sequence[str]:
        """Names of modules whose outputs each batch shall carry."""
        return ()

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

    # -- evaluation -------------------------------------------------------------------------------------------
    def predict(self, received: PartTensors, features: Tensor, logits: Tensor) -> Tensor:
        """Transform the scores ``[N, C]`` whose largest is the predicted class."""
        return logits

    # -- after the last round ---------------------------------------------------------------------------------
    def surveys(self) -> bool:
        """Whether a survey is wanted; as a rule, whether there is a hook for it."""
        return overridden(self, "survey") is not None

    def survey(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """What every client tells of its data under the final model; nothing is trained."""
        return {}

    def conclude(self, server: ServerStep) -> None:
        """With the total of the survey: set ``server.update`` (empty at first) to change the final model."""


STACKED_HOOKS: tuple[str, ...] = ("logits", "loss", "gradient", "after_step", "after_epoch")
"""Hooks that see several clients at once when clients train side by side."""
HOOKS: tuple[str, ...] = ("begin", *STACKED_HOOKS, "end", "predict")


def overridden(part: Part[Any], hook: str) -> Callable[..., Any] | None:
    """The bound hook if the part defines it, else None."""
    return getattr(part, hook) if getattr(type(part), hook) is not getattr(Part, hook) else None
