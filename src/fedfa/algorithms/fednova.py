"""FedNova: updates are divided by how far a client's own optimiser carries it, then averaged.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, *Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization*, NeurIPS 2020.

A client's update is a combination of its gradients, Δ_i = −η Σ_k a_{i,k} g_{i,k}. FedAvg thus weighs client i by
p_i ‖a_i‖₁ and settles at the optimum of another objective than Σ p_i F_i. FedNova averages the normalised updates and
scales them back by one number for all::

    w ← w + τ_eff Σ_i p_i Δ_i / ‖a_i‖₁,      τ_eff = Σ_i p_i ‖a_i‖₁,      p_i = n_i / n over the round's clients.

‖a_i‖₁ is the number of steps for plain SGD; Σ_k (1 − ρ^{τ−k})/(1 − ρ) for local momentum ρ; Σ_k (1 − ημ)^{τ−1−k} for
the proximal term μ/2 ‖w − w_t‖². Both together have no such formula, and none is needed: the sum of the coefficients is
how far the same recursion comes when every gradient is one (:func:`coefficient_sum`). That sum is ‖a_i‖₁ as long as no
coefficient is negative; momentum and a strong proximal term together can make some negative, and then the sum is what
the first-order argument of the paper needs. The published code adds the proximal term after the momentum and, with both
set, counts a sum that belongs to neither order; and with μ it takes τ_eff from the plain numbers of steps.

Weight decay belongs to the gradients. Statistics (BatchNorm) are averaged with weights n_i. A client without a step has
no direction and no weight. Where all clients make equally many steps the result is FedAvg's up to rounding (the
division and the multiplication do not cancel bit for bit).

Sends per client and round: |w| down, |w| + 1 up: n_i Δ_i/‖a_i‖₁ and n_i ‖a_i‖₁, sums as everything else. Server and
client keep: nothing more. Extra compute: one pass over the update per round. What the server learns: besides FedAvg's
update and n_i the number of steps; of secure sums only its mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field

from fedfa.algorithms.gradients import pull_to_start, remember_start
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, ServerStep, Task
from fedfa.learning.tensors import Tensors


class FedNova(Component):
    """The mean of normalised updates."""

    name = "fednova"
    traits = Traits(
        aggregates=True,
        shared_model=True,
        sgd_steps=True,
        excludes={"fedprox": "it must know the proximal term to normalise correctly; set algorithm.fednova.mu instead"},
        stale={"length": "keep"},  # the direction is damped already
    )

    mu: float = Field(0.0, ge=0)
    """μ of a local proximal term μ/2 ‖w − w_t‖², whose effect on ‖a_i‖₁ is taken into account; 0 for none."""

    @property
    def refuses(self) -> Mapping[str, str]:
        """Differential privacy: it would divide by noisy lengths."""
        return {"privacy": "the lengths of local training tell numbers of samples; use fedavg with local.steps"}

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """No state; the proximal term must contract."""
        if task.local is not None and task.local.lr * self.mu >= 1:
            raise AlgorithmError(
                f"algorithm.fednova.mu = {self.mu:g} with local.lr = {task.local.lr:g}: a step on the proximal term "
                "alone would overshoot; keep their product below 1"
            )
        return {}

    def begin(self, ctx: ClientContext) -> None:
        """Remember w_t for the proximal term."""
        if self.mu:
            remember_start(ctx, self.name)

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add μ (w − w_t)."""
        if self.mu:
            pull_to_start(ctx, self.name, self.mu)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """Δ_i/‖a_i‖₁ and ‖a_i‖₁, both with weight n_i; statistics as they are."""
        length = coefficient_sum(ctx.steps, ctx.local.momentum, ctx.local.lr * self.mu)
        weight = ctx.size if ctx.steps else 0
        direction = {name: ctx.update[name] / (length or 1.0) for name in ctx.parameters}
        statistics = {name: value for name, value in ctx.update.items() if name not in ctx.parameters}
        return {
            "direction": WeightedSum.of(direction, weight),
            "length": WeightedSum.of({"length": torch.tensor(length, dtype=torch.float64)}, weight),
            **({"statistics": WeightedSum.of(statistics, ctx.size)} if statistics else {}),
        }

    def step(self, server: ServerStep) -> None:
        """τ_eff times the mean direction."""
        total = server.aggregate
        effective = total.mean(f"{self.name}/length")["length"]
        server.update = {name: effective * value for name, value in total.mean(f"{self.name}/direction").items()}
        if f"{self.name}/statistics" in total:
            server.update |= total.mean(f"{self.name}/statistics")


def coefficient_sum(steps: int, momentum: float, pull: float) -> float:
    """Σ_k a_k of a client's local optimiser.

    With v_k = ρ v_{k−1} + g_k + μ (w_k − w_0) and w_{k+1} = w_k − η v_k, put g_k = 1 and measure the distance in units
    of −η.

    Args:
        steps: τ.
        momentum: ρ.
        pull: ημ.

    Example:
        >>> coefficient_sum(5, 0.0, 0.0)
        5.0
        >>> coefficient_sum(3, 0.5, 0.0)  # 1 + (1 + ½) + (1 + ½ + ¼)
        4.25
        >>> coefficient_sum(3, 0.0, 0.5)  # 1 + ½ + ¼
        1.75
    """
    distance = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - pull * distance
        distance += velocity
    return distance
