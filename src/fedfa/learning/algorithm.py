"""An algorithm: components in order, checked to fit together, with their hooks looked up once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedfa.errors import AlgorithmError
from fedfa.learning.component import Component, Protection, check_defines_something, overridden
from fedfa.learning.context import Role, Task
from fedfa.learning.random import stream
from fedfa.learning.tensors import ComponentTensors, Tensors
from fedfa.models.split import SplitModel

RESERVED = ("model", "round", "recipe", "name", "variant", "clock", "channel")
"""Names that configs, checkpoints or clients use beside the components' own."""


class Algorithm:
    """The components of one method, or of a combination of methods.

    Algorithms and components combine with ``+``. The aggregating component is put first; where none is given, the
    experiment adds FedAvg's.

    Args:
        components: In the order in which their hooks run.
        title: The algorithm expression, e.g. ``"fedfa+fedadam"``; for messages and records.

    Raises:
        AlgorithmError: Components that cannot be combined, or two of one name.
    """

    def __init__(self, components: Sequence[Component], title: str = "") -> None:
        self.title = title or "+".join(component.name for component in components)
        aggregating = [component for component in components if component.traits.aggregates]
        if len(aggregating) > 1:
            raise self._error(
                f"only one component can turn the clients' updates into the server's update, not "
                f"{' and '.join(repr(component.name) for component in aggregating)}; leave out all but one"
            )
        self.components = [*aggregating, *(one for one in components if not one.traits.aggregates)]
        self._check_names()
        self._check_combination()
        self.enabled = [component for component in self.components if component.enabled]
        traits = [component.traits for component in self.enabled]
        self.single_contributions = any(one.single_contributions for one in traits)
        self.uses_horizon = any(one.horizon for one in traits)
        self.pools_data = any(one.pooled_data for one in traits)
        self.personal_model = next((one.name for one in self.enabled if one.traits.personal_model), None)
        self.has_final_pass = any(one.final_pass for one in traits)
        self.outputs = tuple(dict.fromkeys(name for component in self.enabled for name in component.outputs))
        self._hooks = {final: self._overridden_hooks(final) for final in (False, True)}

    def __add__(self, other: Algorithm | Component) -> Algorithm:
        """The components of both, each once."""
        more = other.components if isinstance(other, Algorithm) else [other]
        return Algorithm([*self.components, *(component for component in more if component not in self.components)])

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.components))

    def _error(self, problem: str) -> AlgorithmError:
        return AlgorithmError(f"algorithm {self.title!r}: {problem}")

    def _check_names(self) -> None:
        seen: set[str] = set()
        for component in self.components:
            check_defines_something(type(component))
            name = component.name
            if name in RESERVED or set(name) & set("/:#+. "):
                raise AlgorithmError(
                    f"a component cannot be named {name!r}: {', '.join(RESERVED)} are reserved, and so are / : # + . "
                    "and spaces; choose another name"
                )
            if name in seen:
                raise self._error(f"two components are named {name!r}; name each method once")
            if missing := [needed for needed in component.traits.follows if needed not in seen]:
                raise self._error(f"{name!r} needs {', '.join(map(repr, missing))} before it")
            seen.add(name)

    def _check_combination(self) -> None:
        slots: dict[str, str] = {}
        for component in self.components:
            traits = component.traits
            if traits.slot is not None and slots.setdefault(traits.slot, component.name) != component.name:
                raise self._error(
                    f"{slots[traits.slot]!r} and {component.name!r} are both a {traits.slot}; choose one of them"
                )
            for other in self.components:
                for excluded in (other.name, other.traits.slot):
                    if excluded is not None and excluded in traits.excludes and other is not component:
                        raise self._error(
                            f"{component.name!r} cannot be combined with {other.name!r}: {traits.excludes[excluded]}"
                        )

    def _overridden_hooks(self, final_pass: bool) -> dict[str, list[Callable[..., Any]]]:
        chosen = [component for component in self.enabled if component.traits.final_pass is final_pass]
        return {
            hook: [call for one in chosen if (call := overridden(one, hook)) is not None] for hook in Protection.hooks
        }

    def hooks(self, name: str, *, final_pass: bool = False) -> list[Callable[..., Any]]:
        """The overridden hooks of this name, in order: those of the rounds, or those of the final pass."""
        return self._hooks[final_pass][name]

    # -- before training --------------------------------------------------------------------------------------
    def adapt(self, model: SplitModel, seed: int) -> SplitModel:
        """The network with every component's changes."""
        for component in self.enabled:
            model = component.adapt(model, stream(seed, f"adapt {component.name}"))
        return model

    def init(self, task: Task, seed: int) -> ComponentTensors:
        """Every component's server state before the first round."""
        return {
            component.name: component.init(task, stream(seed, f"init {component.name}")) for component in self.enabled
        }

    def sent(self, state: ComponentTensors, model: Tensors) -> Tensors:
        """The model that clients start from: the evaluated one, and what components are ahead of it."""
        for component in self.enabled:
            if component.traits.ahead:
                ahead = state.get(component.name, {}).items()
                model = model | {name: (model[name].double() + value).to(model[name].dtype) for name, value in ahead}
        return model

    def broadcast(self, state: ComponentTensors) -> ComponentTensors:
        """What the clients receive besides the model: the state of the components that broadcast it."""
        sent = {one.name: dict(state.get(one.name, {})) for one in self.enabled if one.traits.broadcasts}
        return {name: tensors for name, tensors in sent.items() if tensors}

    def with_roles(self, task: Task, *, local_buffers: bool = False) -> Task:
        """The task with the role of every tensor of the model.

        A parameter whose gradient the network's author switched off stays frozen unless a component says otherwise; so
        do tensors that have no mean (masks, complex numbers). Buffers are averaged, or stay with the client.

        Args:
            task: The task.
            local_buffers: Whether each client keeps the buffers that no component claims.

        Raises:
            AlgorithmError: Two components disagree, or a component cannot work with these roles.
        """
        if not any(component.traits.aggregates for component in self.components):
            raise self._error("no component turns the clients' updates into the server's update; add FedAvg()")
        roles = dict.fromkeys(task.model.state(), Role.SHARED)
        roles |= dict.fromkeys(task.model.buffer_names(), Role.LOCAL if local_buffers else Role.AVERAGED)
        for name, value in task.model.state().items():
            if value.dtype is torch.bool or value.is_complex():
                roles[name] = Role.LOCAL if local_buffers and roles[name] is Role.LOCAL else Role.FROZEN
        for name, parameter in task.model.module.named_parameters():
            if not parameter.requires_grad:
                roles[name] = Role.FROZEN
        set_by: dict[str, str] = {}
        for component in self.enabled:
            for name, role in component.roles(task).items():
                if name not in roles:
                    raise self._error(f"{component.name!r} gives a role to {name!r}, which the model does not have")
                if name in set_by and roles[name] is not role:
                    raise self._error(
                        f"{set_by[name]!r} and {component.name!r} want {name!r} to be {roles[name].value} and "
                        f"{role.value}; they cannot be combined"
                    )
                roles[name], set_by[name] = role, component.name
        task = replace(task, roles=roles)
        for component in self.enabled:
            self._check_roles(component, task)
        return task

    def _check_roles(self, component: Component, task: Task) -> None:
        roles, traits = task.roles, component.traits
        if traits.sgd_steps and task.local is not None and task.local.optimiser != "sgd":
            raise self._error(
                f"{component.name!r} takes local steps to be those of SGD, but local.optimiser is "
                f'{task.local.optimiser!r}; set it to "sgd", or choose another method'
            )
        if traits.shared_model and Role.SHARED not in roles.values():
            raise self._error(
                f"{component.name!r} acts on a model that clients share, but here every client keeps its own; leave "
                "out one of the two"
            )
        if not traits.global_classifier:
            return
        if local := [name for name, role in roles.items() if role is Role.LOCAL]:
            raise self._error(
                f"{component.name!r} trains the classifier of one global model, but here each client keeps "
                f"{len(local)} tensors ({local[0]!r} …); leave it out, or the method that keeps them local (if that is "
                'model.buffers, set it to "average")'
            )
        for name in task.model.head_tensors:
            if (role := roles.get(name)) is not Role.SHARED:
                found = "tied to another layer" if role is None else role.value
                raise self._error(
                    f"{component.name!r} trains the classifier, but {name!r} is {found}; leave out "
                    f"{component.name!r}, or what fixes the classifier"
                )
