"""Matched averaging: permutations are found and undone exactly, and nothing else happens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfa.algorithms import FedAvg, MatchedAveraging
from fedfa.algorithms.matched_averaging import align, layer_chain
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.client import ClientResult
from fedfa.learning.context import LocalTraining, Role, Task
from fedfa.learning.round import ClientStatesInMemory, Training
from fedfa.learning.tensors import Tensors, clone
from fedfa.models.split import SplitModel
from fedfa.models.zoo import build_model
from tests.algorithms.quadratics import (
    assert_takes_clients_without_a_step,
    assert_takes_odd_roles,
)
from tests.algorithms.toy import assert_same_rounds, toy_federation
from tests.algorithms.transcription import Array

CHAIN = ["0", "3", "6", "8"]


def network(seed: int) -> nn.Sequential:
    """Convolution, convolution without bias, a flattened map of four positions per channel, two linear layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(5, 4, 2, bias=False), nn.ReLU(), nn.Flatten(),
            nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3),
        ).double()  # fmt: skip


def weights(module: nn.Module) -> Tensors:
    return clone(dict(module.named_parameters()))


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: value.numpy() for name, value in tensors.items()}


def permuted(tensors: Tensors, seed: int) -> Tensors:
    """The same function with its hidden units in another order, layer by layer as one would do it by hand."""
    rng, moved = np.random.default_rng(seed), clone(tensors)
    first, second, third = (torch.from_numpy(rng.permutation(units)) for units in (5, 4, 6))
    moved["0.weight"], moved["0.bias"] = moved["0.weight"][first], moved["0.bias"][first]
    moved["3.weight"] = moved["3.weight"][:, first][second]
    positions = (second[:, None] * 4 + torch.arange(4)).flatten()  # a channel's four positions stay together
    moved["6.weight"], moved["6.bias"] = moved["6.weight"][:, positions][third], moved["6.bias"][third]
    moved["8.weight"] = moved["8.weight"][:, third]
    return moved


def outputs(tensors: Tensors) -> Tensor:
    module = network(0)
    module.load_state_dict(tensors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        result: Tensor = module(torch.randn(10, 2, 8, 8, dtype=torch.float64))
    return result.detach()


def average(clients: list[Tensors], sizes: list[int], start: Tensors, algorithm: str = "matching") -> Tensors:
    """The real server step on clients that return these models."""
    module = network(0)
    module.load_state_dict(start)
    built = build_algorithm(algorithm)
    task = built.with_roles(Task(SplitModel.of(module), 3, len(clients), rounds=1))
    training = Training(built, task, seed=1)
    updates = [{name: value - start[name] for name, value in client.items()} for client in clients]
    results = [
        ClientResult(client, {f"{algorithm}/model": WeightedSum.of(update, size)}, {}, 1, size, None)
        for client, (update, size) in enumerate(zip(updates, sizes, strict=True))
    ]
    state, _ = training.apply(
        training.init(), range(len(clients)), LocalTraining(), lambda *_: iter(results), ClientStatesInMemory()
    )
    return state.model


def test_the_helper_permutes_without_changing_the_function() -> None:
    model = weights(network(1))
    torch.testing.assert_close(outputs(permuted(model, 1)), outputs(model), rtol=1e-12, atol=1e-13)
    assert not torch.equal(permuted(model, 1)["6.weight"], model["6.weight"])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_permuted_copy_is_put_back_exactly(seed: int) -> None:
    model = weights(network(seed))
    aligned = align(CHAIN, arrays(model), arrays(permuted(model, seed)))
    for name, value in model.items():
        np.testing.assert_array_equal(aligned[name], value.numpy(), err_msg=name)


def test_permuted_copies_of_the_global_model_average_to_it() -> None:
    """Where FedAvg makes something else of them."""
    model = weights(network(1))
    copies, sizes = [permuted(model, seed) for seed in range(3)], [1, 2, 5]
    torch.testing.assert_close(average(copies, sizes, model), model, rtol=1e-13, atol=1e-14)
    plain = average(copies, sizes, model, "fedavg")
    assert float((outputs(plain) - outputs(model)).abs().max()) > 0.01


def test_permuted_copies_of_any_model_average_to_that_model_in_some_order() -> None:
    """The global model is another one; every copy is brought to the same order, so the function survives."""
    start, model = weights(network(1)), weights(network(2))
    averaged = average([permuted(model, seed) for seed in range(4)], [1, 1, 2, 3], start)
    torch.testing.assert_close(outputs(averaged), outputs(model), rtol=1e-11, atol=1e-12)
    for name, value in model.items():  # the same numbers, perhaps elsewhere
        torch.testing.assert_close(averaged[name].flatten().sort()[0], value.flatten().sort()[0], rtol=1e-12, atol=0)


def test_the_mean_is_weighted_by_samples() -> None:
    """One layer's head bias has a fixed order: (1·a + 3·b)/4 even where everything else was permuted."""
    start, other = weights(network(1)), weights(network(2))
    averaged = average([permuted(start, 1), other], [1, 3], start)
    expected = (start["8.bias"] + 3 * other["8.bias"]) / 4
    torch.testing.assert_close(averaged["8.bias"], expected, rtol=1e-13, atol=1e-15)
    aligned = align(CHAIN, arrays(start), arrays(other))
    for name, value in start.items():
        np.testing.assert_allclose(averaged[name], (value.numpy() + 3 * aligned[name]) / 4, rtol=1e-11, atol=1e-14)


def test_the_order_found_is_the_best_of_all() -> None:
    """Four units: against all 24 orders, by the summed squared distance of incoming weights and biases."""
    rng = np.random.default_rng(5)
    one, two = (
        {"a.weight": rng.normal(size=(4, 3)), "a.bias": rng.normal(size=4), "b.weight": rng.normal(size=(2, 4))}
        for _ in range(2)
    )

    def distance(rows: Array, bias: Array) -> float:
        return float(np.square(rows - one["a.weight"]).sum() + np.square(bias - one["a.bias"]).sum())

    orders = [list(order) for order in permutations(range(4))]
    best = min(orders, key=lambda order: distance(two["a.weight"][order], two["a.bias"][order]))
    assert best != [0, 1, 2, 3]
    aligned = align(["a", "b"], one, two)
    np.testing.assert_array_equal(aligned["a.weight"], two["a.weight"][best])
    np.testing.assert_array_equal(aligned["a.bias"], two["a.bias"][best])
    np.testing.assert_array_equal(aligned["b.weight"], two["b.weight"][:, best])


def test_aligning_never_changes_a_client_s_function() -> None:
    start, client = weights(network(1)), weights(network(2))
    aligned = align(CHAIN, arrays(start), arrays(client))
    assert any(not np.array_equal(aligned[name], client[name].numpy()) for name in client)
    as_tensors = {name: torch.from_numpy(value.copy()) for name, value in aligned.items()}
    torch.testing.assert_close(outputs(as_tensors), outputs(client), rtol=1e-12, atol=1e-13)


def test_a_client_equal_to_the_global_model_stays_in_its_order_even_with_equal_units() -> None:
    """Dead units have equal incoming weights but different outgoing ones: a tie must not exchange them."""
    model = weights(network(1))
    model["0.weight"][1:4] = model["0.bias"][1:4] = 0
    model["6.weight"][2] = model["6.weight"][4]
    model["6.bias"][2] = model["6.bias"][4]
    client = arrays(model)
    assert align(CHAIN, arrays(model), client) is client
    nothing = {name: np.zeros_like(value) for name, value in client.items()}
    assert align(CHAIN, nothing, client) is client


def test_without_a_permutation_it_is_fedavg_bit_for_bit() -> None:
    """Short local training from common weights does not leave their order."""
    assert_same_rounds(toy_federation(MatchedAveraging()), toy_federation(FedAvg()))
    assert_same_rounds(
        toy_federation(MatchedAveraging(weighting="uniform")), toy_federation(FedAvg(weighting="uniform"))
    )


def test_one_client_is_plain_sgd() -> None:
    one, plain = toy_federation(MatchedAveraging()), toy_federation(FedAvg())
    for federation in (one, plain):
        federation.round([2])
    assert all(torch.equal(value, plain.state.model[name]) for name, value in one.state.model.items())


def test_the_chain_is_read_in_the_order_of_the_forward_pass() -> None:
    """Not in that of registration; activations, pooling and flattening may be modules, functions or methods."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)
            self.middle = nn.Linear(16, 6)
            self.second = nn.Conv2d(5, 4, 2)
            self.first = nn.Conv2d(2, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = functional.max_pool2d(functional.relu(self.first(x)), 2)
            x = self.second(x).relu()
            x = torch.tanh(self.middle(x.view(x.size(0), -1)))
            result: Tensor = self.head(functional.dropout(x, 0.5, self.training))
            return result

    assert layer_chain(Backwards()) == ["first", "second", "middle", "head"]
    assert layer_chain(network(1)) == CHAIN
    assert layer_chain(build_model("cnn-fmnist", (1, 28, 28), 10)) == ["conv1.0", "conv2.0", "fc1.0", "fc2.0", "head"]
    plain = build_model("cnn-mixed-digits", (1, 28, 28), 10, {"norm": "none"})
    assert layer_chain(plain)[-1] == "head"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(x + self.a(x))
        return result


class Twice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(self.a(x)))
        return result


class Untraceable(Residual):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x) if x.sum() > 0 else x)
        return result


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)), "GroupNorm"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), "BatchNorm1d"),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 2)), "Conv2d"),
        (nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2)), "Softmax"),
        (Residual(), "'add' does not take the output before it"),
        (Twice(), "'a' is used twice"),
        (Untraceable(), "cannot be traced"),
    ],
)
def test_networks_that_tie_units_across_layers_are_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(AlgorithmError, match=reason):
        layer_chain(module)


def test_the_paper_s_networks_with_norms_are_refused_through_the_algorithm() -> None:
    task = Task(SplitModel.of(build_model("cnn-mixed-digits", (1, 28, 28), 10)), 10, 2, rounds=1)
    algorithm = build_algorithm("matching")
    with pytest.raises(AlgorithmError, match="GroupNorm"):
        Training(algorithm, algorithm.with_roles(task), seed=1).init()


def test_layers_that_do_not_travel_are_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"'hidden\.bias' is local"):
        assert_takes_odd_roles(MatchedAveraging())
    assert Role.LOCAL.value == "local"


@pytest.mark.parametrize("method", ["fedfa", "fedproc", "moon"])
def test_methods_that_compare_features_across_models_are_refused(method: str) -> None:
    with pytest.raises(AlgorithmError, match="order"):
        build_algorithm(f"matching+{method}")


def test_clients_without_a_step_and_server_optimisers_go_with_it() -> None:
    assert_takes_clients_without_a_step(MatchedAveraging())
    federation = toy_federation("matching+fedadam")
    federation.round()
    federation.round()
    assert "matching" not in federation.plan().broadcast
