"""A recipe: parts in order, checked to fit together, with their hooks looked up once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedfa.errors import RecipeError
from fedfa.learning.part import HOOKS, STACKED_HOOKS, Part, Role, Task, overridden
from fedfa.learning.random import stream
from fedfa.learning.tensors import PartTensors
from fedfa.models.split import SplitModel

RESERVED = ("model", "round", "recipe", "variant")
"""Names that settings, checkpoints or clients use beside the parts' own."""


class Recipe:
    """The parts of one method (or of a combination of methods).

    Args:
        parts: In the order in which their hooks run. The base part (the one that averages) is put first.
        title: How the recipe was asked for, e.g. ``"fedfa+fedadam"``; for messages and records.

    Raises:
        RecipeError: Two parts of one name, no base part or two, or a part that lacks what it requires.
    """

    def __init__(self, parts: Sequence[Part[Any]], title: str = "") -> None:
        self.title = title or "+".join(part.name for part in parts)
        bases = [part for part in parts if part.base]
        if len(bases) != 1:
            found = ", ".join(part.name for part in bases) or "none"
            raise RecipeError(
                f"recipe {self.title!r} needs exactly one part that turns the clients' updates into the server's "
                f"update, but has {found}; leave out all but one"
            )
        self.parts = [*bases, *(part for part in parts if not part.base)]
        seen: set[str] = set()
        for part in self.parts:
            if part.name in RESERVED or set(part.name) & set("/:#+. "):
                raise RecipeError(
                    f"a part cannot be named {part.name!r}: {', '.join(RESERVED)} are taken, as are the signs / : # + ."
                )
            if part.name in seen:
                raise RecipeError(f"recipe {self.title!r} has the part {part.name!r} twice; name each method once")
            if missing := [name for name in part.requires if name not in seen]:
                raise RecipeError(
                    f"recipe {self.title!r}: part {part.name!r} works on {', '.join(map(repr, missing))}, "
                    "which no earlier part provides"
                )
            seen.add(part.name)
        self._check_neighbours()
        self._hooks = {
            hook: [call for part in self.parts if (call := overridden(part, hook)) is not None] for hook in HOOKS
        }
        self.needs_each = any(part.needs_each for part in self.parts)
        self.uses_horizon = any(part.uses_horizon for part in self.parts)
        self.surveys = any(part.surveys() for part in self.parts)
        self.pools_data = any(part.pools_data for part in self.parts)
        self.not_stacking = tuple(
            part.name for part in self.parts if any(overridden(part, h) for h in STACKED_HOOKS) and not _stacks(part)
        )
        """Parts that can only serve one client at a time."""
        self.sees_trained_model = bool(self._hooks["end"]) or any(
            overridden(part, "contribute") and not _contributes_update_only(part) for part in self.parts
        )
        """Whether a part may look at a client's network after its training."""
        self.watches = tuple(dict.fromkeys(name for part in self.parts for name in part.watches()))

    def _check_neighbours(self) -> None:
        slots: dict[str, str] = {}
        for part in self.parts:
            if part.slot is not None and slots.setdefault(part.slot, part.name) != part.name:
                raise RecipeError(
                    f"recipe {self.title!r} has two parts that are a {part.slot}: {slots[part.slot]!r} and "
                    f"{part.name!r}; choose one"
                )
            for other in self.parts:
                for refused in (other.name, other.slot):
                    if refused is not None and refused in part.refuses and other is not part:
                        raise RecipeError(
                            f"recipe {self.title!r}: {part.name!r} does not go with {other.name!r}: "
                            f"{part.refuses[refused]}"
                        )

    def adapt(self, model: SplitModel, seed: int) -> SplitModel:
        """The network with every part's changes."""
        for part in self.parts:
            model = part.adapt(model, stream(seed, f"adapt {part.name}"))
        return model

    def hooks(self, name: str) -> list[Callable[..., Any]]:
        """The overridden hooks of this name, in order."""
        return self._hooks[name]

    def init(self, task: Task, seed: int) -> PartTensors:
        """Every part's server state before the first round."""
        return {part.name: part.init(task, stream(seed, f"init {part.name}")) for part in self.parts}

    def broadcast(self, state: PartTensors, round: int) -> PartTensors:
        """What the clients receive besides the model."""
        sent = {part.name: part.broadcast(state.get(part.name, {}), round) for part in self.parts}
        return {name: tensors for name, tensors in sent.items() if tensors}

    def roles(self, task: Task, *, local_buffers: bool = False) -> dict[str, Role]:
        """The role of every tensor of the model; two parts that disagree are refused.

        A parameter whose owner switched its gradient off stays frozen unless a part says otherwise; so do tensors of
        which there is no mean (masks, complex numbers). Buffers are averaged, or stay with the client.

        Args:
            task: What is to be learnt.
            local_buffers: Whether each client keeps the buffers that no part claims.
        """
        roles = dict.fromkeys(task.model.state(), Role.SHARED)
        roles |= dict.fromkeys(task.model.buffer_names(), Role.LOCAL if local_buffers else Role.AVERAGED)
        for name, value in task.model.state().items():
            if value.dtype is torch.bool or value.is_complex():
                roles[name] = Role.LOCAL if local_buffers and roles[name] is Role.LOCAL else Role.FROZEN
        for name, parameter in task.model.module.named_parameters():
            if not parameter.requires_grad:
                roles[name] = Role.FROZEN
        set_by: dict[str, str] = {}
        for part in self.parts:
            for name, role in part.roles(task).items():
                if name not in roles:
                    raise RecipeError(
                        f"recipe {self.title!r}: part {part.name!r} gives a role to {name!r}, "
                        "which the model does not have"
                    )
                if name in set_by and roles[name] is not role:
                    raise RecipeError(
                        f"recipe {self.title!r}: parts {set_by[name]!r} and {part.name!r} want {name!r} to be "
                        f"{roles[name].value} and {role.value}; they cannot be combined"
                    )
                roles[name], set_by[name] = role, part.name
        for part in self.parts:
            if part.needs_shared_model and Role.SHARED not in roles.values():
                raise RecipeError(
                    f"recipe {self.title!r}: {part.name!r} acts on a model that clients share, but here every client "
                    "keeps its own; leave out one of the two"
                )
            part.check(task, roles)
        return roles


def _stacks(part: Part[Any]) -> bool:
    """Whether a part's hooks serve several clients at once."""
    return part.stacks() and not part.watches() and _says_of_its_own(part, "stacks", STACKED_HOOKS)


def _contributes_update_only(part: Part[Any]) -> bool:
    """Whether what a part sends does not need the client's network."""
    return part.contributes_update_only and _says_of_its_own(part, "contributes_update_only", ("contribute",))


def _says_of_its_own(part: Part[Any], claim: str, hooks: Sequence[str]) -> bool:
    """Whether a claim was made for these hooks: a subclass that replaces one must say so anew."""
    said_by, *definers = (next(c for c in type(part).__mro__ if name in vars(c)) for name in (claim, *hooks))
    return all(issubclass(said_by, definer) for definer in definers)
