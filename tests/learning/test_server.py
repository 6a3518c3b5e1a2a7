from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfa.learning.aggregate import Aggregate, WeightedSum
from fedfa.learning.component import Component
from fedfa.learning.context import Role, ServerStep, Task
from fedfa.learning.round import ServerState
from fedfa.learning.tensors import Tensors, clone
from tests.learning.learning_toys import Bench, toy_data, toy_network


def one_round(bench: Bench, state: ServerState, clients: int = 2) -> ServerState:
    return bench.round(state, [toy_data(4 + 4 * client, seed=client) for client in range(clients)])


def test_state_comes_back_from_its_tensors() -> None:
    state = ServerState(
        7,
        {"conv.weight": torch.randn(2, 3), "bn.num_batches_tracked": torch.tensor(5)},
        {"anchors": {"anchors": torch.randn(3, 4)}, "moments": {"a.b": torch.zeros(2), "step": torch.tensor(2)}},
    )
    back = ServerState.from_tensors(state.to_tensors())
    assert back.round == 7
    assert isinstance(back.round, int)
    for old, new in ((state.model, back.model), *((state.components[p], back.components[p]) for p in state.components)):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) and old[name].dtype == new[name].dtype for name in old)
    assert back.components.keys() == state.components.keys()


class LateWriter(Component):
    """Has no server state at first and writes some in the third round."""

    name = "late"

    def step(self, server: ServerStep) -> None:
        if server.round == 2:
            server.state[self.name]["seen"] = torch.ones(1)


def test_a_component_without_state_can_get_one_also_after_a_resume() -> None:
    bench = Bench([LateWriter()])
    state = bench.state()
    for _ in range(2):
        state = one_round(bench, state)
    resumed = ServerState.from_tensors(state.to_tensors())
    assert torch.equal(one_round(bench, state).components["late"]["seen"], torch.ones(1))  # never stopped: works
    assert torch.equal(one_round(bench, resumed).components["late"]["seen"], torch.ones(1))


def test_round_by_hand() -> None:
    """w + Σ n_i Δ_i / Σ n_i, with n = 1 and 3 and Δ = 2 and 6: w moves by 5."""
    bench = Bench()
    aggregate = Aggregate()
    for weight, change in ((1, 2.0), (3, 6.0)):
        update = {name: torch.full_like(value, change) for name, value in bench.start.items()}
        aggregate.add({"fedavg/model": WeightedSum.of(update, weight)})
    before = clone(bench.start)
    state = bench.training.server_step(ServerState(0, bench.start, {}), aggregate)
    assert state.round == 1
    for name, value in before.items():
        assert torch.equal(state.model[name], (value.double() + 5).float())
        assert torch.equal(bench.start[name], value), "the state before the round was changed in place"


class Doubling(Component):
    """Transforms the update and counts rounds in its own state."""

    name = "doubling"

    def init(self, task: Task, rng: object) -> Tensors:
        return {"rounds": torch.zeros(())}

    def step(self, server: ServerStep) -> None:
        server.update = {name: 2 * value for name, value in server.update.items()}
        server.state[self.name]["rounds"] = server.state[self.name]["rounds"] + 1


def test_later_components_transform_the_update_and_renew_their_state() -> None:
    plain, doubled = Bench(), Bench([Doubling()])
    once = one_round(plain, plain.state())
    state = doubled.state()
    twice = one_round(doubled, state)
    assert twice.components["doubling"]["rounds"].item() == 1
    assert state.components["doubling"]["rounds"].item() == 0, "the state before the round was changed in place"
    for name, start in plain.start.items():
        moved = once.model[name] - start
        assert moved.abs().sum() > 0
        assert torch.allclose(twice.model[name] - start, 2 * moved, rtol=1e-4, atol=1e-6)


def test_counters_of_batch_norm_stay_whole_numbers() -> None:
    bench = Bench(network=toy_network(nn.BatchNorm1d(5)))
    state = one_round(bench, bench.state())
    counter = state.model["1.num_batches_tracked"]
    assert counter.dtype == torch.int64
    # 2 epochs of 1 batch (4 samples) and of 2 batches (8 samples), weights 4 and 8: (4·2 + 8·4) / 12 = 3.33 → 3
    assert counter.item() == 3


@pytest.mark.parametrize("role", [Role.LOCAL, Role.FROZEN])
def test_only_shared_tensors_move(role: Role) -> None:
    class Roles(Component):
        name = "roles"

        def roles(self, task: Task) -> dict[str, Role]:
            return {"0.weight": role}

    bench = Bench([Roles()])
    state = one_round(bench, bench.state())
    moved = {name for name, value in state.model.items() if not torch.equal(value, bench.start[name])}
    assert moved == {"0.bias", "2.weight", "2.bias"}


def test_contributions_are_additive_end_to_end() -> None:
    """The server's step from the clients one by one equals the step from a worker's partial sums of them."""
    bench = Bench()
    contributions = [bench.trainer.train(bench.plan(), c, toy_data(5 + c, seed=c), {}).contribution for c in range(4)]
    one_by_one, first, second, joined = Aggregate(), Aggregate(), Aggregate(), Aggregate()
    for number, each in enumerate(contributions):
        one_by_one.add(each)
        (first if number < 2 else second).add(each)
    for half in (first, second):
        joined.add({"fedavg/model": half["fedavg/model"]})
    a, b = (bench.training.server_step(bench.state(), aggregate) for aggregate in (one_by_one, joined))
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
