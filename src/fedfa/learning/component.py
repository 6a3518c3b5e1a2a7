"""The interface of every method.

A federated algorithm is a list of components. A component overrides the hooks in which its method differs from plain
federated training; every hook defaults to doing nothing, and a hook that is not overridden costs nothing. Options are
typed fields of the component.

Hooks, in the order in which they run::

    before training   adapt → roles → init
    each round
      client            begin
                          per batch:  logits → loss → (backward pass) → gradient → (optimiser step) → after_step
                        after_epoch
                      contribute
      server          step       sees the aggregate of all contributions
    evaluation        predict

A component of the final pass (``Traits(final_pass=True)``: CCVR, FedFA's final calibration) runs ``contribute`` on
every client and ``step`` once, after the last round, instead of in each round. A :class:`Protection` stands between
``contribute`` and ``step``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError
from torch import Tensor

from fedfa.error_messages import validation_message
from fedfa.errors import AlgorithmError, ConfigError
from fedfa.learning.aggregate import Contribution, WeightedSum
from fedfa.learning.context import Batch, ClientContext, Role, ServerStep, Task
from fedfa.learning.tensors import ComponentTensors, Tensors
from fedfa.models.split import SplitModel

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass

    from fedfa.learning.algorithm import Algorithm
else:
    ModelMetaclass = type(BaseModel)


@dataclass(frozen=True)
class Traits:
    """What a component needs, offers and refuses."""

    aggregates: bool = False
    """Turns the cohort's contributions into ``server.update``; an algorithm has exactly one such component."""
    broadcasts: bool = False
    """Sends its server state to the clients of each round. Otherwise the state stays on the server."""
    ahead: bool = False
    """Its server state, by the names of the model's tensors, is how far the model that clients receive is ahead of the
    one that is evaluated; ``server.update`` stays what is added to the latter."""
    follows: tuple[str, ...] = ()
    """Components that must come earlier in the algorithm."""
    slot: str | None = None
    """A position that only one component can fill, e.g. ``"server optimiser"``."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Components or slots it cannot be combined with, each with the reason."""
    shared_model: bool = False
    """Acts on tensors that clients share: refused where every trained tensor stays with its client."""
    global_classifier: bool = False
    """Trains the classifier of one global model: refused where clients keep tensors or the classifier is frozen."""
    single_contributions: bool = False
    """Its server step reads each client's contribution, not only their sum."""
    horizon: bool = False
    """Depends on the planned number of rounds: such a run cannot be extended afterwards."""
    pooled_data: bool = False
    """There are no clients: one site holds all data and makes as many steps as the cohort would."""
    sgd_steps: bool = False
    """Its equations take local steps to be SGD's: refused with another ``local.optimiser``."""
    personal_model: bool = False
    """Its client state is a model of the client's own, by the names of the model's tensors, beside the global one."""
    final_pass: bool = False
    """Runs once after the last round, on all clients, instead of in each round."""
    stale: Mapping[str, Literal["damp", "weigh", "keep"]] = field(default_factory=dict)
    """How groups of its contribution are scaled where they arrive late, if not as usual; see fedfa.fleet.staleness."""
    exact: tuple[str, ...] = ()
    """Groups of its contribution that no channel may compress; ``"*"``: all, and its broadcast too."""
    late: str = ""
    """Why contributions to an older model cannot be used; policies under which they occur are then refused."""
    class_states: tuple[str, ...] = ()
    """Groups of its contribution that hold one row per class and become its broadcast state of the same tensor names.
    Under differential privacy they travel as differences from what was received."""


HOOKS: tuple[str, ...] = (
    "adapt", "roles", "init", "begin", "logits", "loss", "gradient", "after_step", "after_epoch", "contribute", "step",
    "predict",
)  # fmt: skip
"""All hooks, in the order in which they run."""


class _ComponentClass(ModelMetaclass):
    """Refuses options without a type while the class is made, which pydantic would do in terms of its own."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **arguments: Any) -> type:
        try:
            return super().__new__(mcs, name, bases, namespace, **arguments)
        except PydanticUserError as error:
            if error.code != "model-field-missing-annotation":
                raise
        option, value = _first_untyped(namespace, bases)
        kind = type(value).__name__
        raise AlgorithmError(
            f"{name}.{option} has no type; write `{option}: {kind} = {value!r}` for an option, or "
            f"`{option}: ClassVar[{kind}] = {value!r}` (from typing) for a constant that nobody sets"
        )


def _first_untyped(namespace: Mapping[str, Any], bases: tuple[type, ...]) -> tuple[str, Any]:
    """The first attribute that is neither annotated nor of a kind that needs no annotation."""
    typed = {name for base in bases for ancestor in base.__mro__ for name in vars(ancestor).get("__annotations__", {})}
    typed |= set(namespace.get("__annotations__", {}))
    plain = (property, classmethod, staticmethod, type)
    return next(
        (name, value)
        for name, value in namespace.items()
        if not name.startswith("_") and name not in typed and not inspect.isfunction(value)
        and not isinstance(value, plain)
    )  # fmt: skip


class Component(BaseModel, metaclass=_ComponentClass):
    """One building block of a federated algorithm. Override the hooks you need; declare options as annotated fields.

    A component holds nothing but its options. Whatever changes lives in named tensors: the server state, the client
    state, or the scratch space of a round.

    Example:
        >>> class Shrink(Component):
        ...     strength: float = 0.01
        ...     def loss(self, ctx, batch, loss):
        ...         return loss + self.strength * batch.features.square().mean()
        >>> Shrink(strength=0.1).name
        'shrink'
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True, populate_by_name=True,
        protected_namespaces=(), allow_inf_nan=False,
    )  # fmt: skip

    name: ClassVar[str]
    """Names the component's options, state and contributions; left out, the class name in lower case."""
    traits: ClassVar[Traits] = Traits()
    """What the component needs, offers and refuses."""
    hooks: ClassVar[tuple[str, ...]] = HOOKS
    """The methods that a subclass may override."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(validation_message(error, type(self), f"algorithm.{self.name}")) from None

    def __setattr__(self, option: str, value: Any) -> None:
        raise AlgorithmError(
            f"{self.name}.{option} cannot be assigned: a component holds its options and nothing that changes; keep "
            f"values of a client's round in ctx.scratch[{self.name!r}], and what lasts in the server or client state"
        )

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        """Fill in the name, and refuse methods that look like hooks but are none."""
        if "name" not in vars(cls) and not any("name" in vars(base) for base in cls.__mro__[1:]):
            cls.name = cls.__name__.lower()
        for method, value in vars(cls).items():
            if inspect.isfunction(value) and not method.startswith("_"):
                if method in cls.hooks:
                    _check_arguments(cls, method, value)
                else:
                    _refuse_misspelt_hook(cls, method, value)

    @property
    def enabled(self) -> bool:
        """Whether the component does anything with these options; otherwise none of its hooks is called."""
        return True

    @property
    def outputs(self) -> Sequence[str]:
        """Names of modules whose outputs each batch carries."""
        return ()

    @property
    def refuses(self) -> Mapping[str, str]:
        """Protections (``"robust"``, ``"privacy"``, ``"masks"``) that its options rule out, with the reasons."""
        return {}

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """Only the options that differ from their defaults."""
        fields = type(self).model_fields
        return [(name, value) for name, value in self if name in fields and value != fields[name].default]

    def __add__(self, other: Component | Algorithm) -> Algorithm:
        """Combine two components, or a component and an algorithm."""
        from fedfa.learning.algorithm import Algorithm

        return Algorithm([self]) + other

    # -- before training --------------------------------------------------------------------------------------
    def adapt(self, model: SplitModel, rng: np.random.Generator) -> SplitModel:
        """Return the network to train, made from the configured one (e.g. with another classifier)."""
        return model

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Return the roles of tensors of the model that differ from the default, by name."""
        return {}

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """Return the server state before the first round; raise AlgorithmError if the task does not fit the method."""
        return {}

    # -- client -----------------------------------------------------------------------------------------------
    def begin(self, ctx: ClientContext) -> None:
        """Prepare for the round, before local training."""

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        """Transform the logits that enter the cross-entropy."""
        return logits

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Transform the loss of a batch: add a term, weigh it."""
        return loss

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Change the gradients in place, after the backward pass and before the optimiser step."""

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Act after an optimiser step; ``batch`` still holds the features of the forward pass."""

    def after_epoch(self, ctx: ClientContext) -> None:
        """Act after a local epoch; after the last one (``ctx.last_epoch``) is the last chance to change the model."""

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """Return what goes to the server, by group; ``ctx.update`` is known."""
        return {}

    # -- server -----------------------------------------------------------------------------------------------
    def step(self, server: ServerStep) -> None:
        """Update ``server.state[self.name]``; set or transform ``server.update``."""

    # -- evaluation -------------------------------------------------------------------------------------------
    def predict(self, broadcast: ComponentTensors, features: Tensor, logits: Tensor) -> Tensor:
        """Transform the scores ``[N, C]`` whose largest is the predicted class."""
        return logits


_HOOK_ARGUMENTS = {"ctx", "server", "task", "batch"}
_OTHER_NAMES = {
    "on_batch": "after_step", "on_batch_end": "after_step", "on_step": "after_step", "on_epoch_end": "after_epoch",
    "on_train_begin": "begin", "on_train_start": "begin", "on_fit_start": "begin", "on_train_end": "contribute",
    "compute_loss": "loss", "local_loss": "loss", "criterion": "loss", "forward": "logits", "aggregate": "step",
    "server_step": "step", "server_update": "step", "aggregate_fit": "step", "client_update": "contribute",
    "setup": "init", "initialise": "init", "initialize": "init", "end": "after_epoch", "survey": "contribute",
    "conclude": "step", "surveys": "enabled", "check": "init", "watches": "outputs", "broadcast": "step",
}  # fmt: skip
"""Names that other frameworks (and earlier releases) use, with the nearest hook here."""


def _refuse_misspelt_hook(cls: type[Component], method: str, function: Callable[..., Any]) -> None:
    arguments = list(inspect.signature(function).parameters)[1:]
    near = _OTHER_NAMES.get(method) or next(iter(difflib.get_close_matches(method, cls.hooks, 1, 0.75)), None)
    if near is None and not _HOOK_ARGUMENTS & set(arguments):
        return
    meant = f" (did you mean {near!r}?)" if near else ""
    raise AlgorithmError(
        f"{cls.__name__}.{method} looks like a hook, but there is no hook of that name{meant}; the hooks are "
        f"{', '.join(cls.hooks)}. Start the names of helper methods with an underscore"
    )


def _check_arguments(cls: type[Component], hook: str, function: Callable[..., Any]) -> None:
    """Refuse a hook that cannot be called with the arguments of that hook."""
    base = next((base for base in cls.__mro__[1:] if hasattr(base, hook)), cls)
    expected = list(inspect.signature(getattr(base, hook)).parameters)
    try:
        inspect.signature(function).bind(*expected)
    except TypeError:
        raise AlgorithmError(
            f"{cls.__name__}.{hook} has the wrong arguments; write: def {hook}({', '.join(expected)})"
        ) from None


class Protection(Component):
    """A stage between the clients' contributions and the aggregate: it sees those of all components at once.

    Besides the hooks of every component it has two of its own, which run in the final pass too.
    """

    hooks: ClassVar[tuple[str, ...]] = (*HOOKS, "protect", "combine")

    def protect(self, ctx: ClientContext, contribution: Contribution) -> Contribution:
        """Transform everything that leaves the client, after every component's ``contribute``."""
        return contribution

    def combine(self, server: ServerStep) -> None:
        """Replace ``server.aggregate`` before any component's ``step``."""


def overridden(component: Component, hook: str) -> Callable[..., Any] | None:
    """The bound hook if the component defines it, else None."""
    return getattr(component, hook) if _overrides(type(component), hook) else None


def _overrides(kind: type[Component], hook: str) -> bool:
    return hook in kind.hooks and getattr(kind, hook) is not getattr(Protection, hook)


def check_defines_something(kind: type[Component]) -> None:
    """Refuse a component class that overrides no hook and declares no trait: it would do nothing.

    Raises:
        AlgorithmError: The class is empty.
    """
    if kind.traits == Traits() and not any(_overrides(kind, hook) for hook in kind.hooks):
        raise AlgorithmError(
            f"{kind.__name__} overrides no hook, so it would change nothing; override one of {', '.join(kind.hooks)}"
        )
