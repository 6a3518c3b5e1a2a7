"""Server optimisers: the averaged update is taken for a gradient, and the server makes its step with an optimiser.

FedAvgM: T.-M. H. Hsu, H. Qi, M. Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification*, arXiv:1909.06335, 2019. FedAdagrad, FedAdam, FedYogi: S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett,
K. Rush, J. Konečný, S. Kumar, H. B. McMahan, *Adaptive Federated Optimization*, ICLR 2021, Algorithm 2.

With Δ the update that the recipe's base part made (FedAvg's mean unless another is named)::

    FedAvgM      v ← β v + Δ                              w ← w + η v
    adaptive     m ← β₁ m + (1 − β₁) Δ                    w ← w + η m / (√v + τ)
      FedAdagrad   v ← v + Δ²
      FedAdam      v ← β₂ v + (1 − β₂) Δ²
      FedYogi      v ← v − (1 − β₂) Δ² sign(v − Δ²)

m and FedAvgM's v start at zero, the adaptive v at τ² (the least the paper allows); there is no bias correction, as in
the paper. They act on what clients train; statistics (BatchNorm) take the mean as it is. A recipe has one of them:
``"fedfa+fedadam"``.

Sends per client and round: nothing besides what the rest of the recipe sends. Server keeps: |w| numbers (FedAvgM) or
2|w|, in double precision as the update itself. Client keeps: nothing. Extra compute: a few passes over the model per
round, on the server. What the server learns: nothing more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedfa.algorithms.method import AUTHORS_TRAINING, Method
from fedfa.learning.part import Options, OptionsT, Part, ServerStep
from fedfa.learning.tensors import Tensors


class MomentumOptions(Options):
    """Options of FedAvgM."""

    lr: float = Field(1.0, gt=0)
    """Server learning rate η."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """β; 0 with η = 1 is the recipe without it, bit for bit."""


class AdaptiveOptions(Options):
    """Options that the adaptive methods share."""

    lr: float = Field(0.01, gt=0)
    """Server learning rate η, about the most that a weight moves in a round: √v follows |Δ|, so m/√v is about one."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """β₁: how much of the mean of past updates m is kept in a round; 0 takes each round's update alone."""
    tau: float = Field(0.001, gt=0)
    """Adaptivity τ: where updates stay below it, a weight moves by less than η Δ/τ."""


class DecayingOptions(AdaptiveOptions):
    """Options of FedAdam and FedYogi."""

    beta2: float = Field(0.99, ge=0, lt=1)
    """β₂: how much of the mean of past squared updates v is kept in a round."""


class AdagradOptions(AdaptiveOptions):
    """Options of FedAdagrad."""

    beta1: float = Field(0.0, ge=0, lt=1)
    """β₁; 0 is plain Adagrad."""


AdaptiveT = TypeVar("AdaptiveT", bound=AdaptiveOptions)


class ServerOptimiser(Part[OptionsT]):
    """What all of them have in common: the place, and state that stays on the server."""

    slot = "server optimiser"
    needs_shared_model = True

    def broadcast(self, state: Tensors, round: int) -> Tensors:
        """Nothing: moments are the server's own."""
        return {}


class ServerMomentum(ServerOptimiser[MomentumOptions]):
    """FedAvgM."""

    name = "fedavgm"
    options_type = MomentumOptions

    def step(self, server: ServerStep) -> None:
        """Velocity v ← β v + Δ, model w ← w + η v."""
        state = server.state[self.name]
        for name in server.trained:
            update = server.update[name]
            state[name] = self.options.momentum * state[name] + update if name in state else update
            server.update[name] = self.options.lr * state[name]


class Adaptive(ServerOptimiser[AdaptiveT], ABC):
    """Algorithm 2 of Reddi et al.; the rule for v is each method's own."""

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v, from the last one and Δ²."""

    def step(self, server: ServerStep) -> None:
        """m, v, and w ← w + η m / (√v + τ)."""
        state, options = server.state[self.name], self.options
        for name in server.trained:
            update = server.update[name]
            m = state.get(f"m.{name}", torch.zeros_like(update))
            v = state.get(f"v.{name}", torch.full_like(update, options.tau**2))
            state[f"m.{name}"] = m = options.beta1 * m + (1 - options.beta1) * update
            state[f"v.{name}"] = v = self.second_moment(v, update.square())
            server.update[name] = options.lr * m / (v.sqrt() + options.tau)


class ServerAdagrad(Adaptive[AdagradOptions]):
    """FedAdagrad."""

    name = "fedadagrad"
    options_type = AdagradOptions

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The sum of all squares."""
        return v + square


class ServerAdam(Adaptive[DecayingOptions]):
    """FedAdam."""

    name = "fedadam"
    options_type = DecayingOptions

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """A decaying mean of the squares."""
        return self.options.beta2 * v + (1 - self.options.beta2) * square


class ServerYogi(Adaptive[DecayingOptions]):
    """FedYogi."""

    name = "fedyogi"
    options_type = DecayingOptions

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Like FedAdam's, but a v that is far too large shrinks no faster than the squares allow."""
        return v - (1 - self.options.beta2) * square * (v - square).sign()


FEDAVGM = Method(
    name="fedavgm",
    summary="FedAvgM (Hsu et al. 2019): momentum on the server.",
    parts=(ServerMomentum,),
    variants={"paper": {}, "authors": {**AUTHORS_TRAINING}},
)
FEDADAGRAD = Method(
    name="fedadagrad",
    summary="FedAdagrad (Reddi et al. 2021): Adagrad on the server.",
    parts=(ServerAdagrad,),
    variants={"paper": {}, "authors": {**AUTHORS_TRAINING}},
)
FEDADAM = Method(
    name="fedadam",
    summary="FedAdam (Reddi et al. 2021): Adam on the server.",
    parts=(ServerAdam,),
    variants={"paper": {}, "authors": {**AUTHORS_TRAINING}},
)
FEDYOGI = Method(
    name="fedyogi",
    summary="FedYogi (Reddi et al. 2021): Yogi on the server.",
    parts=(ServerYogi,),
    variants={"paper": {}, "authors": {**AUTHORS_TRAINING}},
)
