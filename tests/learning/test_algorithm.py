from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedfa.algorithms.fedavg import FedAvg
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component, Traits, overridden
from fedfa.learning.context import Batch, ClientContext, Role, ServerStep, Task
from fedfa.learning.tensors import Tensors
from tests.learning.learning_toys import CLASSES, toy_network


class Plain(Component):
    def step(self, server: ServerStep) -> None: ...


class Needy(Component):
    traits = Traits(follows=("plain",))


class OwnAggregation(Component):
    name = "own-aggregation"
    traits = Traits(aggregates=True)


class Private(Component):
    """The classifier stays with the client."""

    name = "private"
    role: ClassVar[Role] = Role.LOCAL

    def roles(self, task: Task) -> Mapping[str, Role]:
        return {f"{task.model.head_name}.weight": self.role}


class Fixed(Private):
    name = "fixed"
    role: ClassVar[Role] = Role.FROZEN


class SamePrivate(Private):
    name = "same"


def task() -> Task:
    return Task(toy_network(), CLASSES, num_clients=5, rounds=3)


def test_the_aggregating_component_comes_first_and_the_others_keep_their_order() -> None:
    algorithm = Algorithm([Plain(), Needy(), FedAvg()])
    assert [component.name for component in algorithm.components] == ["fedavg", "plain", "needy"]
    assert algorithm.title == "plain+needy+fedavg"


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([Plain()], "no component turns the clients' updates into the server's update; add FedAvg"),
        ([FedAvg(), OwnAggregation()], "only one component .* not 'fedavg' and 'own-aggregation'"),
        ([FedAvg(), Plain(), Plain()], "two components are named 'plain'"),
        ([FedAvg(), Needy()], "'needy' needs 'plain' before it"),
        ([FedAvg(), Needy(), Plain()], "'needy' needs 'plain' before it"),
    ],
    ids=["no aggregation", "two aggregations", "twice", "missing", "too late"],
)
def test_components_that_do_not_fit_are_refused(components: list[Component], message: str) -> None:
    with pytest.raises(AlgorithmError, match=f"algorithm 'asked-for': {message}"):
        Algorithm(components, title="asked-for").with_roles(task())


def test_a_component_that_overrides_nothing_is_refused() -> None:
    class Empty(Component):
        mu: float = 0.1

    with pytest.raises(AlgorithmError, match="Empty overrides no hook, so it would change nothing; override one of"):
        Algorithm([FedAvg(), Empty()])


@pytest.mark.parametrize(("method", "near"), [("after_epochs", "after_epoch"), ("aggregate", "step")])
def test_a_misspelt_hook_is_refused_where_the_class_is_defined(method: str, near: str) -> None:
    def hook(self: object, server: ServerStep) -> None: ...

    with pytest.raises(AlgorithmError, match=rf"Wrong\.{method} looks like a hook.*did you mean '{near}'"):
        type("Wrong", (Component,), {method: hook, "__module__": __name__})


def test_only_overridden_hooks_are_called() -> None:
    class Stepper(Component):
        name = "stepper"

        def begin(self, ctx: ClientContext) -> None: ...

        def loss(self, ctx: ClientContext, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
            return loss

    algorithm = Algorithm([FedAvg(), Stepper()])
    assert len(algorithm.hooks("begin")) == len(algorithm.hooks("loss")) == 1
    assert algorithm.hooks("after_epoch") == algorithm.hooks("after_step") == algorithm.hooks("gradient") == []
    assert overridden(Plain(), "begin") is None


def test_each_component_draws_its_initial_state_from_a_stream_of_its_own() -> None:
    class Drawer(Component):
        name = "drawer"

        def init(self, task: Task, rng: np.random.Generator) -> Tensors:
            return {"x": torch.from_numpy(rng.standard_normal(3))}

    class Other(Drawer):
        name = "other"

    alone = Algorithm([FedAvg(), Drawer()]).init(task(), seed=4)
    together = Algorithm([FedAvg(), Other(), Drawer()]).init(task(), seed=4)
    assert torch.equal(alone["drawer"]["x"], together["drawer"]["x"])
    assert not torch.equal(together["other"]["x"], together["drawer"]["x"])
    assert not torch.equal(alone["drawer"]["x"], Algorithm([FedAvg(), Drawer()]).init(task(), seed=5)["drawer"]["x"])
    assert together["fedavg"] == {}


def test_only_components_that_broadcast_send_their_state() -> None:
    class Sender(Component):
        traits = Traits(broadcasts=True)

    class Stateless(Component):
        traits = Traits(broadcasts=True)

    state = {"sender": {"x": torch.tensor(2.0)}, "plain": {"y": torch.tensor(1.0)}, "stateless": {}}
    sent = Algorithm([FedAvg(), Sender(), Plain(), Stateless()]).broadcast(state)
    assert sent == {"sender": {"x": torch.tensor(2.0)}}
    assert sent["sender"] is not state["sender"]


def test_roles_are_shared_unless_a_component_sets_another() -> None:
    roles = Algorithm([FedAvg(), Private()]).with_roles(task()).roles
    assert roles == {
        "0.weight": Role.SHARED, "0.bias": Role.SHARED, "2.weight": Role.LOCAL, "2.bias": Role.SHARED,
    }  # fmt: skip
    assert Algorithm([FedAvg(), Private(), SamePrivate()]).with_roles(task()).roles == roles


def test_components_that_disagree_on_a_role_are_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"'private' and 'fixed' want '2.weight' to be local and frozen"):
        Algorithm([FedAvg(), Private(), Fixed()]).with_roles(task())


def test_a_role_for_an_unknown_tensor_is_refused() -> None:
    class Misspelt(Component):
        name = "misspelt"

        def roles(self, task: Task) -> Mapping[str, Role]:
            return {"2.wieght": Role.LOCAL}

    with pytest.raises(AlgorithmError, match=r"2\.wieght"):
        Algorithm([FedAvg(), Misspelt()]).with_roles(task())


def test_a_component_cannot_take_the_name_of_the_model() -> None:
    class Model(Plain):
        name = "model"

    with pytest.raises(AlgorithmError, match="cannot be named 'model'"):
        Algorithm([FedAvg(), Model()])


def test_single_contributions_are_kept_only_for_components_that_ask() -> None:
    class Robust(Component):
        traits = Traits(single_contributions=True)

    assert not Algorithm([FedAvg(), Plain()]).single_contributions
    assert Algorithm([FedAvg(), Robust()]).single_contributions


def test_a_component_that_is_switched_off_takes_no_part() -> None:
    class Switched(Component):
        traits = Traits(horizon=True, final_pass=True, single_contributions=True)
        on: bool = False

        @property
        def enabled(self) -> bool:
            return self.on

        def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
            return {}

    off, on = Algorithm([FedAvg(), Switched()]), Algorithm([FedAvg(), Switched(on=True)])
    assert [off.uses_horizon, off.has_final_pass, off.single_contributions] == [False] * 3
    assert [component.name for component in off.enabled] == ["fedavg"]
    assert [on.uses_horizon, on.has_final_pass, on.single_contributions] == [True] * 3
    assert len(on.hooks("contribute")) == len(on.hooks("contribute", final_pass=True)) == 1
    assert off.hooks("contribute", final_pass=True) == []
