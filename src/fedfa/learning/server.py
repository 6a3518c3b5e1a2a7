"""The server's round: plan, total, step. Knows no method and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedfa.errors import FedfaError, RecipeError
from fedfa.learning.part import Role, ServerStep
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
    recipe: Recipe, roles: Mapping[str, Role], state: ServerState, total: Total, num_clients: int
) -> ServerState:
    """The state after a round, from the state before it and the cohort's total.

    The base part makes the update, the other parts transform it or renew their own state, and the update is added to
    the model. Nothing is changed in place.
    """
    server = ServerStep(
        round=state.round,
        model=state.model,
        state={part.name: dict(state.parts.get(part.name, {})) for part in recipe.parts},
        total=total,
        num_clients=num_clients,
    )
    for part in recipe.parts:
        try:
            part.step(server)
        except FedfaError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise RecipeError(f"part {part.name!r}, server step of round {state.round + 1}: {problem}") from error
    model: Tensors = {}
    for name, value in state.model.items():
        if roles[name] is Role.SHARED and name in server.update:
            moved = value.double() + server.update[name]
            model[name] = (moved if value.is_floating_point() else moved.round()).to(value.dtype)
        else:
            model[name] = value
    return ServerState(
        state.round + 1, contiguous(model), {part: contiguous(own) for part, own in server.state.items()}
    )
