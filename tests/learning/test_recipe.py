from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.algorithms.fedavg import Averaging
from fedfa.errors import RecipeError
from fedfa.learning.part import Batch, ClientContext, NoOptions, Part, Role, Task, overridden
from fedfa.learning.recipe import Recipe
from fedfa.learning.tensors import Tensors
from tests.learning.learning_toys import CLASSES, toy_network


class Plain(Part[NoOptions]):
    name = "plain"


class Needy(Part[NoOptions]):
    name = "needy"
    requires = ("plain",)


class OwnBase(Part[NoOptions]):
    name = "own-base"
    base = True


class Private(Part[NoOptions]):
    """The classifier stays with the client."""

    name = "private"
    role = Role.LOCAL

    def roles(self, task: Task) -> Mapping[str, Role]:
        return {f"{task.model.head_name}.weight": self.role}


class Fixed(Private):
    name = "fixed"
    role = Role.FROZEN


class SamePrivate(Private):
    name = "same"


def task() -> Task:
    return Task(toy_network(), CLASSES, num_clients=5, rounds=3)


def test_the_base_comes_first_and_the_others_keep_their_order() -> None:
    recipe = Recipe([Plain(), Needy(), Averaging()])
    assert [part.name for part in recipe.parts] == ["fedavg", "plain", "needy"]
    assert recipe.title == "plain+needy+fedavg"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([Plain()], ["exactly one part", "none"]),
        ([Averaging(), OwnBase()], ["exactly one part", "fedavg, own-base"]),
        ([Averaging(), Plain(), Plain()], ["'plain' twice"]),
        ([Averaging(), Needy()], ["'needy'", "'plain'", "no earlier part"]),
        ([Averaging(), Needy(), Plain()], ["'needy'", "'plain'", "no earlier part"]),
    ],
    ids=["no base", "two bases", "twice", "missing", "too late"],
)
def test_parts_that_do_not_fit_are_refused(parts: list[Part[Any]], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe(parts, title="asked-for")
    assert "'asked-for'" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_only_overridden_hooks_are_called() -> None:
    class Stepper(Part[NoOptions]):
        name = "stepper"

        def begin(self, ctx: ClientContext) -> None: ...

        def loss(self, ctx: ClientContext, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
            return loss

    recipe = Recipe([Averaging(), Stepper()])
    assert len(recipe.hooks("begin")) == len(recipe.hooks("loss")) == 1
    assert recipe.hooks("end") == recipe.hooks("after_step") == recipe.hooks("gradient") == []
    assert overridden(Plain(), "begin") is None


def test_each_part_draws_its_initial_state_from_a_stream_of_its_own() -> None:
    class Drawer(Part[NoOptions]):
        name = "drawer"

        def init(self, task: Task, rng: np.random.Generator) -> Tensors:
            return {"x": torch.from_numpy(rng.standard_normal(3))}

    class Other(Drawer):
        name = "other"

    alone = Recipe([Averaging(), Drawer()]).init(task(), seed=4)
    together = Recipe([Averaging(), Other(), Drawer()]).init(task(), seed=4)
    assert torch.equal(alone["drawer"]["x"], together["drawer"]["x"])
    assert not torch.equal(together["other"]["x"], together["drawer"]["x"])
    assert not torch.equal(alone["drawer"]["x"], Recipe([Averaging(), Drawer()]).init(task(), seed=5)["drawer"]["x"])
    assert together["fedavg"] == {}


def test_broadcast_gives_each_part_its_own_state_and_leaves_out_the_silent() -> None:
    class Halves(Part[NoOptions]):
        name = "halves"

        def broadcast(self, state: Tensors, round: int) -> Tensors:
            return {"round": state["x"] * round}

    state = {"halves": {"x": torch.tensor(2.0)}, "plain": {"y": torch.tensor(1.0)}}
    sent = Recipe([Averaging(), Halves(), Plain(), Needy()]).broadcast(state, 3)
    assert sent == {"halves": {"round": torch.tensor(6.0)}, "plain": {"y": torch.tensor(1.0)}}


def test_roles_are_shared_unless_a_part_says_otherwise() -> None:
    roles = Recipe([Averaging(), Private()]).roles(task())
    assert roles == {
        "0.weight": Role.SHARED, "0.bias": Role.SHARED, "2.weight": Role.LOCAL, "2.bias": Role.SHARED,
    }  # fmt: skip
    assert Recipe([Averaging(), Private(), SamePrivate()]).roles(task()) == roles


def test_parts_that_disagree_on_a_role_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"'private' and 'fixed' want '2.weight' to be local and frozen"):
        Recipe([Averaging(), Private(), Fixed()]).roles(task())


def test_a_role_for_an_unknown_tensor_is_refused() -> None:
    class Misspelt(Part[NoOptions]):
        name = "misspelt"

        def roles(self, task: Task) -> Mapping[str, Role]:
            return {"2.wieght": Role.LOCAL}

    with pytest.raises(RecipeError, match=r"2\.wieght"):
        Recipe([Averaging(), Misspelt()]).roles(task())


def test_a_part_cannot_take_the_name_of_the_model() -> None:
    class Model(Part[NoOptions]):
        name = "model"

    with pytest.raises(RecipeError, match="model"):
        Recipe([Averaging(), Model()])


def test_single_updates_are_kept_only_for_parts_that_ask() -> None:
    class Robust(Part[NoOptions]):
        name = "robust"
        needs_each = True

    assert not Recipe([Averaging(), Plain()]).needs_each
    assert Recipe([Averaging(), Robust()]).needs_each
