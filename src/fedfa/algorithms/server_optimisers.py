"""Server optimisers: the averaged update is taken for a gradient, and the server makes its step with an optimiser.

FedAvgM: T.-M. H. Hsu, H. Qi, M. Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification*, arXiv:1909.06335, 2019. FedAdagrad, FedAdam, FedYogi: S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett,
K. Rush, J. Konečný, S. Kumar, H. B. McMahan, *Adaptive Federated Optimization*, ICLR 2021, Algorithm 2.

With Δ the update of the aggregating component (FedAvg's mean unless another is named)::

    FedAvgM      v ← β v + Δ                              w ← w + η v
    adaptive     m ← β₁ m + (1 − β₁) Δ                    w ← w + η m / (√v + τ)
      FedAdagrad   v ← v + Δ²
      FedAdam      v ← β₂ v + (1 − β₂) Δ²
      FedYogi      v ← v − (1 − β₂) Δ² sign(v − Δ²)

m and FedAvgM's v start at zero, the adaptive v at τ² (the least the paper allows); there is no bias correction, as in
the paper. They act on what clients train; statistics (BatchNorm) take the mean as it is. An algorithm has one of them:
``"fedfa+fedadam"``.

Sends per client and round: nothing besides what the rest of the algorithm sends. Server state: |w| numbers (FedAvgM) or
2|w|, in double precision as the update itself. Client state: nothing. Extra compute: a few passes over the model per
round, on the server. What the server learns: nothing more.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ServerStep

SERVER_OPTIMISER = Traits(slot="server optimiser", shared_model=True)


class FedAvgM(Component):
    """Momentum on the server."""

    name = "fedavgm"
    traits = SERVER_OPTIMISER

    lr: float = Field(1.0, gt=0)
    """Server learning rate η."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """β; 0 with η = 1 is the algorithm without it, bit for bit."""

    def step(self, server: ServerStep) -> None:
        """Velocity v ← β v + Δ, model w ← w + η v."""
        state = server.state[self.name]
        for name in server.trained:
            update = server.update[name]
            state[name] = self.momentum * state[name] + update if name in state else update
            server.update[name] = self.lr * state[name]


class Adaptive(Component):
    """Algorithm 2 of Reddi et al.; each method has its own rule for v."""

    name = "adaptive"
    traits = SERVER_OPTIMISER

    lr: float = Field(0.01, gt=0)
    """Server learning rate η, about the most that a weight moves in a round: √v follows |Δ|, so m/√v is about one."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """β₁: how much of the mean of past updates m is kept in a round; 0 takes each round's update alone."""
    tau: float = Field(0.001, gt=0)
    """Adaptivity τ: where updates stay below it, a weight moves by less than η Δ/τ."""

    def step(self, server: ServerStep) -> None:
        """m, v, and w ← w + η m / (√v + τ)."""
        state = server.state[self.name]
        for name in server.trained:
            update = server.update[name]
            m = state.get(f"m.{name}", torch.zeros_like(update))
            v = state.get(f"v.{name}", torch.full_like(update, self.tau**2))
            state[f"m.{name}"] = m = self.beta1 * m + (1 - self.beta1) * update
            state[f"v.{name}"] = v = self._second_moment(v, update.square())
            server.update[name] = self.lr * m / (v.sqrt() + self.tau)

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v, from the last one and Δ²."""
        raise NotImplementedError


class FedAdagrad(Adaptive):
    """Adagrad on the server."""

    name = "fedadagrad"

    beta1: float = Field(0.0, ge=0, lt=1)
    """β₁; 0 is plain Adagrad."""

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The sum of all squares."""
        return v + square


class FedAdam(Adaptive):
    """Adam on the server."""

    name = "fedadam"

    beta2: float = Field(0.99, ge=0, lt=1)
    """β₂: how much of the mean of past squared updates v is kept in a round."""

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """A decaying mean of the squares."""
        return self.beta2 * v + (1 - self.beta2) * square


class FedYogi(Adaptive):
    """Yogi on the server."""

    name = "fedyogi"

    beta2: float = Field(0.99, ge=0, lt=1)
    """β₂: how much of the mean of past squared updates v is kept in a round."""

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Like FedAdam's, but a v that is far too large shrinks no faster than the squares allow."""
        return v - (1 - self.beta2) * square * (v - square).sign()
