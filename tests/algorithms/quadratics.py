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
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fedfa.algorithms import FedNova, FedProx, MatchedAveraging, Scaffold
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext, LocalTraining, Role, Task
from fedfa.learning.tensors import clone
from tests.algorithms.federation_harness import Federation, Samples
from tests.algorithms.toy import assert_same_bits, toy_federation
from tests.algorithms.transcription import Array


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


class QuadraticLoss(Component):
    """Puts the client's quadratic in the place of the cross-entropy; each step adds client + 1 to the statistic."""

    name = "quadratic"

    A: Tensor
    b: Tensor
    g: Tensor

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        i, w = ctx.client, ctx.parameters["point.weight"][0]
        ctx.model.state()["statistic"].add_(i + 1)
        return (w - self.b[i]) @ self.A[i] @ (w - self.b[i]) / 2 + self.g[i] @ w


class Quadratics(Federation):
    """A federation of quadratic clients.

    Args:
        algorithm: The method.
        A: One matrix per client (or one number, for one dimension).
        b: One vector per client (or one number).
        g: One vector per client of linear terms; none if left out.
        steps: Local steps, for all or per client.
        sizes: Samples per client; they only act as weights.
        start: The initial model; zero if left out.
        local: Further values of the local training.
    """

    def __init__(
        self,
        algorithm: Algorithm | Component,
        A: ArrayLike,
        b: ArrayLike,
        *,
        g: ArrayLike | None = None,
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
        loss = QuadraticLoss(A=torch.from_numpy(self.A), b=torch.from_numpy(self.b), g=torch.from_numpy(g))
        super().__init__(
            algorithm + loss,
            Point([0.0] * self.dim if start is None else start),
            [Samples(np.zeros((size, self.dim)), np.zeros(size, dtype=np.int64), classes=1) for size in sizes],
            LocalTraining(**{"epochs": 1, "batch_size": 1, "lr": lr, "weight_decay": 0.0, **local}),
        )
        self.steps = [steps] * count if isinstance(steps, int) else steps

    def local_of(self, client: int, local: LocalTraining) -> LocalTraining:
        return local.model_copy(update={"steps": self.steps[client]})

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

    def client_value(self, client: int, component: str) -> float:
        """The client state of a component, where it is one number."""
        return float(self.client_states[client][component]["point.weight"])


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


class OddRoles(Component):
    """Leaves the hidden bias on the client and never trains the classifier's."""

    name = "oddroles"

    def roles(self, task: Task) -> Mapping[str, Role]:
        return {"hidden.bias": Role.LOCAL, "classifier.bias": Role.FROZEN}


def assert_takes_odd_roles(algorithm: Algorithm | Component) -> Federation:
    """Parameters that stay on the client or are frozen are neither corrected, nor stored, nor moved by the method."""
    federation = toy_federation(algorithm + OddRoles())
    frozen, local = (federation.state.model[name].clone() for name in ("classifier.bias", "hidden.bias"))
    for cohort in ([0, 1], [1, 2], [0, 2]):
        federation.round(cohort)
    assert torch.equal(federation.state.model["classifier.bias"], frozen)
    assert torch.equal(federation.state.model["hidden.bias"], local), "the server's copy must not change"
    component = federation.algorithm.components[0].name
    for client_state in federation.client_states.values():
        assert client_state.get(component, {}).keys() <= {"hidden.weight", "classifier.weight"}
    assert all(torch.isfinite(value).all() for value in federation.state.to_tensors().values())
    return federation


def assert_takes_clients_without_a_step(algorithm: Algorithm | Component) -> Federation:
    """Batches of 12, no incomplete last one: of the toy's clients (11, 7 and 13 samples) only the third trains."""
    federation = toy_federation(algorithm, batch_size=12, drop_last=True)
    for _ in range(3):
        federation.round()
    assert all(torch.isfinite(value).all() for value in federation.state.to_tensors().values())
    before = clone(federation.state.model)
    federation.round([0, 1])
    if isinstance(algorithm, FedProx | FedNova | Scaffold | MatchedAveraging):  # the others move by their state
        assert_same_bits(federation.state.model, before)
    return federation
