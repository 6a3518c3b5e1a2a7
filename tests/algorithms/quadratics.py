"""Clients whose losses are quadratic, trained by the real client loop and the real server.

Client i's loss is f_i(w) = ½ (w − b_i)ᵀ A_i (w − b_i) + g_i·w, whatever the batch. So K local steps are a linear map,
and everything a method does can be written down:

- full gradient steps take w − b_i to M_i (w − b_i) with M_i = (I − η A_i)^K (for g_i = 0);
- the sum Σ p_i f_i has its minimum at (Σ p_i A_i)⁻¹ Σ p_i A_i b_i;
- FedAvg settles where its mean update Σ p_i (M_i − I)(w − b_i) vanishes, which is another place unless K = 1, the A_i
  are equal, or the b_i are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fedfa.algorithms.registry import build_recipe
from fedfa.learning.client import ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.part import Batch, ClientContext, LocalTraining, Part, Role, Task
from fedfa.learning.recipe import Recipe
from fedfa.learning.server import ServerState, finish_round
from fedfa.learning.sums import Total
from fedfa.learning.tensors import PartTensors, clone
from fedfa.models.split import SplitModel
from tests.algorithms.toy import Network, Samples, toy_samples
from tests.algorithms.transcription import Array

Options = Mapping[str, Mapping[str, Any]]


class Federation:
    """Rounds with any cohort; what clients keep is kept, and the server's state travels as in a checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        clients: Sequence[Samples],
        local: LocalTraining,
        *,
        steps: Sequence[int] | None = None,
        seed: int = 1,
    ) -> None:
        self.recipe, self.clients, self.local, self.steps, self.seed = recipe, clients, local, steps, seed
        self.model = SplitModel.of(network)
        task = Task(self.model, self.model.num_classes, len(clients), rounds=1000, local=local)
        self.roles = recipe.roles(task)
        self.trainer = ClientTrainer(self.model, recipe, self.roles)
        self.state = ServerState(0, clone(self.model.state()), recipe.init(task, seed))
        self.kept: dict[int, PartTensors] = {}

    def plan(self, client: int | None = None) -> RoundPlan:
        steps = self.steps[client] if self.steps is not None and client is not None else self.local.steps
        received = self.recipe.broadcast(self.state.parts, self.state.round)
        local = replace(self.local, steps=steps)
        return RoundPlan(self.state.round, self.state.model, received, local, self.seed, rounds=1000)

    def train(self, client: int) -> ClientResult:
        result = self.trainer.train(self.plan(client), client, self.clients[client], self.kept.get(client, {}))
        self.kept[client] = result.kept
        return result

    def play(self, cohort: Sequence[int] | None = None) -> ServerState:
        """One round of these clients (all of them if not said)."""
        total = Total(keep_each=self.recipe.needs_each)
        for client in range(len(self.clients)) if cohort is None else cohort:
            total.add(self.train(client).sums)
        state = finish_round(self.recipe, self.roles, self.state, total, len(self.clients), self.seed)
        self.state = ServerState.from_tensors(state.to_tensors())
        return self.state


class Point(nn.Module):
    """A network that is a point w, with one statistic that clients gather without training it."""

    statistic: Tensor

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.point = nn.Linear(len(start), 1, bias=False).double()
        self.point.weight.data = torch.tensor([list(start)], dtype=torch.float64)
        self.register_buffer("statistic", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.point(x)
        return result


class QuadraticLoss(Part[Any]):
    """Puts the client's quadratic in the place of the cross-entropy; each step adds client + 1 to the statistic."""

    name = "quadratic"

    def __init__(self, A: Tensor, b: Tensor, g: Tensor) -> None:
        super().__init__()
        self.A, self.b, self.g = A, b, g

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        i, w = ctx.client, ctx.parameters["point.weight"][0]
        ctx.model.state()["statistic"].add_(i + 1)
        return (w - self.b[i]) @ self.A[i] @ (w - self.b[i]) / 2 + self.g[i] @ w


class Quadratics(Federation):
    """A federation of quadratic clients.

    Args:
        recipe: The method.
        A: One matrix per client (or one number, for one dimension).
        b: One vector per client (or one number).
        g: One vector per client of linear terms; none if not said.
        options: Of the method's parts.
        steps: Local steps, for all or per client.
        sizes: Samples per client; they only act as weights.
        start: The initial model; zero if not said.
        local: Further values of the local training.
    """

    def __init__(
        self,
        recipe: str,
        A: ArrayLike,
        b: ArrayLike,
        *,
        g: ArrayLike | None = None,
        options: Options | None = None,
        steps: int | Sequence[int] = 1,
        sizes: Sequence[int] | None = None,
        start: Sequence[float] | None = None,
        lr: float = 0.1,
        **local: Any,
    ) -> None:
        self.b = np.asarray(b, dtype=np.float64).reshape(len(np.asarray(b)), -1)
        count, self.dim = self.b.shape
        self.A = np.asarray(A, dtype=np.float64).reshape(count, self.dim, self.dim)
        g = np.zeros_like(self.b) if g is None else np.asarray(g, dtype=np.float64).reshape(self.b.shape)
        sizes = [1] * count if sizes is None else sizes
        parts = build_recipe(recipe, options or {}).parts
        loss = QuadraticLoss(torch.from_numpy(self.A), torch.from_numpy(self.b), torch.from_numpy(g))
        super().__init__(
            Recipe([*parts, loss]),
            Point([0.0] * self.dim if start is None else start),
            [Samples(np.zeros((size, self.dim)), np.zeros(size, dtype=np.int64), classes=1) for size in sizes],
            LocalTraining(**{"epochs": 1, "batch_size": 1, "lr": lr, "momentum": 0.0, "weight_decay": 0.0, **local}),
            steps=[steps] * count if isinstance(steps, int) else steps,
        )

    @property
    def w(self) -> Array:
        """The global model."""
        point: Array = self.state.model["point.weight"][0].numpy().copy()
        return point

    @property
    def value(self) -> float:
        """The global model, where it is one number."""
        return float(self.w.item())

    @property
    def statistic(self) -> float:
        return float(self.state.model["statistic"])

    def kept_value(self, client: int, part: str) -> float:
        """What a client keeps, where it is one number."""
        return float(self.kept[client][part]["point.weight"])


def quadratics(clients: int = 3, dim: int = 2, seed: int = 1) -> tuple[Array, Array]:
    """Curvatures between ½ and 2 in directions of their own, and optima far apart."""
    rng = np.random.default_rng(seed)
    curvatures, optima = [], rng.normal(size=(clients, dim)) * 3
    for _ in range(clients):
        Q, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
        curvatures.append(Q @ np.diag(rng.uniform(0.5, 2.0, dim)) @ Q.T)
    return np.array(curvatures), optima


def optimum(A: Array, b: Array, *, weights: ArrayLike | None = None, decay: float = 0.0) -> Array:
    """Minimum of Σ weight · f_i + decay/2 ‖w‖² (weights add up to one)."""
    p = np.full(len(A), 1 / len(A)) if weights is None else np.asarray(weights, dtype=np.float64) / np.sum(weights)
    curvature = np.einsum("i,ijk->jk", p, A) + decay * np.eye(A.shape[1])
    solution: Array = np.linalg.solve(curvature, np.einsum("i,ijk,ik->j", p, A, b))
    return solution


def averaged_fixed_point(
    A: Array, b: Array, steps: Sequence[int], lr: float, *, weights: ArrayLike | None = None, scales: Any = 1.0
) -> Array:
    """Where Σ p_i s_i (I − M_i)(w − b_i) = 0: FedAvg's fixed point for s_i = 1, FedNova's for s_i = 1/K_i."""
    M = np.array([np.linalg.matrix_power(np.eye(len(a)) - lr * a, k) for a, k in zip(A, steps, strict=True)])
    p = np.ones(len(A)) if weights is None else np.asarray(weights, dtype=np.float64)
    return optimum(np.eye(A.shape[1]) - M, b, weights=p * scales)


def random_cohorts(clients: int, size: int, rounds: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sorted(rng.choice(clients, size, replace=False).tolist()) for _ in range(rounds)]


def classifiers(
    recipe: str | Recipe, options: Options | None = None, *, network: nn.Module | None = None, **local: Any
) -> Federation:
    """The toy's clients and network with the real loss, in double precision."""
    samples = [Samples(x, y) for x, y in toy_samples(1)]
    if network is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            network = Network().double()
    return Federation(
        build_recipe(recipe, options or {}) if isinstance(recipe, str) else recipe,
        network,
        samples,
        LocalTraining(**{"epochs": 2, "batch_size": 4, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.001, **local}),
    )


class OddRoles(Part[Any]):
    """Keeps the hidden bias on the client and never trains the classifier's."""

    name = "oddroles"

    def roles(self, task: Task) -> Mapping[str, Role]:
        return {"hidden.bias": Role.LOCAL, "classifier.bias": Role.FROZEN}


def assert_same_rounds(one: Federation, other: Federation, rounds: int = 2) -> None:
    """The two give the same bits, round after round."""
    for _ in range(rounds):
        first, second = one.play().model, other.play().model
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(value, second[name]), name


def assert_takes_odd_roles(recipe: str, options: Options | None = None) -> Federation:
    """Parameters that stay on the client or are frozen are neither corrected, nor kept, nor moved by the method."""
    game = classifiers(Recipe([*build_recipe(recipe, options or {}).parts, OddRoles()]))
    frozen, local = (game.state.model[name].clone() for name in ("classifier.bias", "hidden.bias"))
    for cohort in ([0, 1], [1, 2], [0, 2]):
        game.play(cohort)
    assert torch.equal(game.state.model["classifier.bias"], frozen)
    assert torch.equal(game.state.model["hidden.bias"], local), "the server's copy has no meaning, but must not change"
    part = game.recipe.parts[0].name
    for kept in game.kept.values():
        assert kept.get(part, {}).keys() <= {"hidden.weight", "classifier.weight"}
    assert all(torch.isfinite(value).all() for value in game.state.to_tensors().values())
    return game


def assert_takes_clients_without_a_step(recipe: str, options: Options | None = None) -> Federation:
    """Batches of 12, no incomplete last one: of the toy's clients (11, 7 and 13 samples) only the third trains."""
    game = classifiers(recipe, options, batch_size=12, drop_last=True)
    for _ in range(3):
        game.play()
    assert all(torch.isfinite(value).all() for value in game.state.to_tensors().values())
    before = clone(game.state.model)
    game.play([0, 1])
    if recipe in ("fedprox", "fednova", "scaffold", "fedma"):  # the others move by what they remember
        assert all(torch.equal(value, before[name]) for name, value in game.state.model.items())
    return game
