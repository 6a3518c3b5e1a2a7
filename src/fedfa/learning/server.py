"""The server's round: plan, total, step. Knows no method and no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedfa.errors import FedfaError, RecipeError
from fedfa.learning.part import Part, Role, ServerStep
from fedfa.learning.random import stream
from fedfa.learning.recipe import Recipe
from fedfa.learning.sums import Total
from fedfa.learning.tensors import PartTensors, Tensors, contiguous, flatten, unflatten

_MODEL = "model"


@dataclass(frozen=True)
class ServerState:
    """Everything the server carries from round to round, as named tensors.

    ``round`` counts the rounds that are done.
    """

    round: int
    model: Tensors
    parts: PartTensors

    def to_tensors(self) -> Tensors:
        """As one flat dictionary, for checkpoints."""
        return {**flatten({_MODEL: self.model, **self.parts}), "round": torch.tensor(self.round)}

    @classmethod
    def from_tensors(cls, flat: Mapping[str, torch.Tensor]) -> ServerState:
        """The inverse of :meth:`to_tensors`."""
        nested = unflatten({name: value for name, value in flat.items() if name != "round"})
        return cls(int(flat["round"]), nested.pop(_MODEL), nested)


def finish_round(
    recipe: Recipe, roles: Mapping[str, Role], state: ServerState, total: Total, num_clients: int, seed: int
) -> ServerState:
    """The state after a round, from the state before it and the cohort's total.

    The base part makes the update, the other parts transform it or renew their own state, and the update is added to
    the model. Nothing is changed in place.
    """
    server = _server_step(recipe, roles, state, total, num_clients, seed)
    for part in recipe.parts:
        _guarded(part, part.step, server, f"server step of round {state.round + 1}")
    return _after(server, state.round + 1)


def finish_survey(
    recipe: Recipe, roles: Mapping[str, Role], state: ServerState, total: Total, num_clients: int, seed: int
) -> ServerState:
    """The state after the survey that follows the last round; the number of rounds stays."""
    server = _server_step(recipe, roles, state, total, num_clients, seed)
    for part in recipe.parts:
        _guarded(part, part.conclude, server, "conclusion")
    return _after(server, state.round)


def _server_step(
    recipe: Recipe, roles: Mapping[str, Role], state: ServerState, total: Total, num_clients: int, seed: int
) -> ServerStep:
    return ServerStep(
        round=state.round,
        model=state.model,
        state={part.name: dict(state.parts.get(part.name, {})) for part in recipe.parts},
        total=total,
        num_clients=num_clients,
        roles=roles,
        rng=stream(seed, "server", state.round),
    )


def _guarded(part: Part[Any], hook: Callable[[ServerStep], None], server: ServerStep, where: str) -> None:
    try:
        hook(server)
    except FedfaError:
        raise
    except Exception as error:
        raise RecipeError(f"part {part.name!r}, {where}: {type(error).__name__}: {error}") from error


def _after(server: ServerStep, rounds: int) -> ServerState:
    model: Tensors = {}
    for name, value in server.model.items():
        if server.roles[name] is not Role.LOCAL and name in server.update:
            moved = value.double() + server.update[name]
            model[name] = (moved if value.is_floating_point() else moved.round()).to(value.dtype)
        else:
            model[name] = value
    return ServerState(rounds, contiguous(model), {part: contiguous(own) for part, own in server.state.items()})
