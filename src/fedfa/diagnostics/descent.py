"""The paper's Lemma 3 (loss after one round) and Theorem 3 (convergence), with both sides measured.

Lemma 3 bounds the change of the global loss L = Σ q_i L_i in a round of τ local steps of size η by

    −τη/2 ‖∇L‖² + τ L₁ η² σ² + τ² η³ L₁² G²/4 + μ τ η² L₂² G²,

with L₁ the smoothness of L_i, σ² the variance and G² the mean square of stochastic gradients, L₂ the Lipschitz constant
of the features; it needs τ η L₁ ≤ ½. The proof slips in three places:

- ‖Σ_k v_k‖² ≤ Σ_k ‖v_k‖² is used twice; the inequality has a factor, the number of terms.
- Σ_k Σ_{s<k} G² is summed to (τ − 1) G²/2; it is τ (τ − 1) G²/2, and with the factor k of the slip above Σ_k k² G².
- ‖x − a'‖² − ‖x − a‖² ≤ ‖a' − a‖² is the triangle inequality, which holds for norms and not for their squares; the
  difference is at most 2 ‖x − a‖ ‖a' − a‖ + ‖a' − a‖².

Mended, the third term becomes η³ L₁² G² τ (τ − 1)(2τ − 1)/12 and the fourth μ (L₂² τ² η² G² + 2 D L₂ τ η G), D being
the distance of features from their anchors.

The constants are suprema over all weights, which cannot be measured. Here they are the largest values met: L₁ and L₂
between the model before the round, the one after it and the one after a plain gradient step, σ² at the model before, G²
on the way. They are therefore too small, and so are the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfa.diagnostics.theory import single_step
from fedfa.engines.engine import Engine
from fedfa.errors import FedfaError
from fedfa.learning.aggregate import Aggregate, WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, LocalTraining
from fedfa.learning.round import ServerState, Training
from fedfa.learning.tensors import ComponentTensors, Tensors

_STILL = 1e-30
"""A learning rate that moves no weight."""


class Descent(Component):
    """Records the gradients of a client's steps; does not affect training."""

    name = "descent"
    traits = Traits(exact=("*",))

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add up this step's gradient, its square, and the largest square."""
        gradients = [p.grad.flatten().double() for p in ctx.parameters.values() if p.grad is not None]
        gradient, mine = torch.cat(gradients), ctx.scratch.setdefault(self.name, {})
        square = gradient.square().sum()
        mine["sum"] = mine["sum"] + gradient if "sum" in mine else gradient
        mine["squares"] = mine.get("squares", 0) + square
        mine["largest"] = torch.maximum(mine.get("largest", square), square)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The sums, and the features before the training."""
        if not ctx.steps:
            return {}
        mine: Tensors = dict(ctx.scratch[self.name])
        features = ctx.features(ctx.start).double()
        anchors = ctx.broadcast.get("anchors", {}).get("anchors")
        apart = torch.zeros(()) if anchors is None else (features - anchors.double()[ctx.labels()]).norm(dim=1).max()
        steps = torch.tensor(float(ctx.steps))
        mine |= {
            "features": features,
            "from anchors": apart.double(),
            "steps": steps,
            "size": torch.tensor(float(ctx.size)),
        }
        return {"record": WeightedSum.of(mine, 1)}


@dataclass(frozen=True)
class OneRound:
    """Everything in Lemma 3, measured in one round of some clients, who are taken for the federation."""

    lr: float
    mu: float
    steps: float
    """τ, the largest number of steps of a client."""
    loss_before: float
    loss_after: float
    gradient: float
    """‖∇L‖² before the round."""
    smoothness: float
    """L₁."""
    lipschitz: float
    """L₂."""
    variance: float
    """σ²."""
    square: float
    """G²."""
    anchor_distance: float
    """D."""

    @property
    def change(self) -> float:
        """The left side: L after minus L before."""
        return self.loss_after - self.loss_before

    @property
    def step_condition(self) -> float:
        """τ η L₁, which the proof needs to be at most ½."""
        return self.steps * self.lr * self.smoothness

    @property
    def bound(self) -> float:
        """The right side as printed."""
        t, lr, L1, L2, G2 = self.steps, self.lr, self.smoothness, self.lipschitz, self.square
        drift, anchors = G2 * L1**2 * t**2 * lr**3 / 4, self.mu * L2**2 * lr**2 * t * G2
        return -t * lr / 2 * self.gradient + t * L1 * lr**2 * self.variance + drift + anchors

    @property
    def mended_bound(self) -> float:
        """The right side with the factors that the proof loses."""
        t, lr, L1, L2, G2 = self.steps, self.lr, self.smoothness, self.lipschitz, self.square
        drift = lr**3 * L1**2 * G2 * t * (t - 1) * (2 * t - 1) / 12
        moved = L2 * t * lr * G2**0.5
        anchors = self.mu * (moved**2 + 2 * self.anchor_distance * moved)
        return float(-t * lr / 2 * self.gradient + t * L1 * lr**2 * self.variance + drift + anchors)

    @property
    def least_epsilon(self) -> float:
        """The smallest mean squared gradient that Theorem 3 can promise with these constants, however many rounds."""
        L1, G2 = self.smoothness, self.square
        drift = self.steps * self.lr**2 * L1**2 * G2
        return (4 * self.lr * L1 * self.variance + drift + 4 * self.mu * self.lr * self.lipschitz**2 * G2) / 4

    @property
    def largest_mu(self) -> float:
        """The bound on μ in Theorem 3 for ε = ‖∇L‖² before the round; below zero there is no such μ."""
        L1, G2 = self.smoothness, self.square
        return (self.gradient - L1 * (self.variance + L1 * G2)) / (self.lipschitz**2 * G2)


def one_round(
    training: Training,
    engine: Engine,
    state: ServerState,
    local: LocalTraining,
    clients: Sequence[int],
    client_state: Callable[[int], ComponentTensors],
    mu: float,
) -> OneRound:
    """Train the clients of one round, and measure both sides of Lemma 3.

    Args:
        training: Its algorithm must have the component :class:`Descent`.
        engine: Of that training.
        state: Before the round.
        local: How clients train; without weight decay and momentum, which the lemma does not have.
        clients: Taken for the whole federation.
        client_state: Returns a client's state.
        mu: Weight of the anchor loss; 0 for methods without one.

    Raises:
        FedfaError: A client did not train.
    """
    if not _trained(training):
        raise FedfaError("Lemma 3 is about weights that clients share, and here they share none; choose another method")
    record = f"{Descent.name}/record"
    local = local.model_copy(update={"weight_decay": 0.0, "momentum": 0.0})
    full = single_step(local)

    def measured(at: ServerState, how: LocalTraining) -> tuple[list[Tensors], float, ServerState]:
        """The clients' records, the weighted loss of their steps, and the server state that follows."""
        aggregate, records, losses = Aggregate(keep_each=training.algorithm.single_contributions), [], []
        for result in engine.train(training.plan(at, how), clients, client_state):
            if record not in result.contribution:
                raise FedfaError(f"client {result.client} made no step; Lemma 3 needs all of them to train")
            records.append(result.contribution[record].tensors)
            losses.append(float(result.loss or 0.0))
            aggregate.add({group: entry for group, entry in result.contribution.items() if group != record})
        shares = _shares(records)
        loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        return records, loss, replace(training.server_step(at, aggregate), round=at.round)

    start, loss_before, near = measured(state, full)
    noise, _, _ = measured(state, local.model_copy(update={"lr": _STILL}))
    way, _, after = measured(state, local)
    end, loss_after, _ = measured(after, full)
    # L₁ and L₂ compare two models under one loss: with the anchors of before.
    near, far = (replace(other, components=state.components) for other in (near, after))
    close, _, _ = measured(near, full)
    distant, _, _ = measured(far, full)
    head = set(training.task.model.head_tensors)
    smooth, lipschitz = [], []
    for other, records in ((far, distant), (near, close)):
        moved = {name: (other.model[name] - value).double() for name, value in state.model.items()}
        whole = _length([value for name, value in moved.items() if name in _trained(training)])
        extractor = _length([value for name, value in moved.items() if name in _trained(training) - head])
        for before, later in zip(start, records, strict=True):
            smooth.append(float((later["sum"] - before["sum"]).norm()) / whole)
            apart = (later["features"] - before["features"]).norm(dim=1).max()
            lipschitz.append(float(apart) / extractor if extractor else 0.0)
    gradient = sum(share * one["sum"] for share, one in zip(_shares(start), start, strict=True))
    assert isinstance(gradient, Tensor)
    return OneRound(
        lr=local.lr, mu=mu, steps=max(float(one["steps"]) for one in way), loss_before=loss_before,
        loss_after=loss_after, gradient=float(gradient.square().sum()), smoothness=max(smooth),
        lipschitz=max(lipschitz), variance=max(_variance(one) for one in noise),
        square=max(float(one["largest"]) for one in [*way, *noise]),
        anchor_distance=max(float(one["from anchors"]) for one in end),
    )  # fmt: skip


def _variance(one: Tensors) -> float:
    """E ‖g − E g‖² of a client's batches at one model."""
    return float(one["squares"] / one["steps"] - (one["sum"] / one["steps"]).square().sum())


def _shares(records: Sequence[Tensors]) -> list[float]:
    total = sum(float(one["size"]) for one in records)
    return [float(one["size"]) / total for one in records]


def _trained(training: Training) -> set[str]:
    return {name for name, role in training.roles.items() if role.value == "shared"}


def _length(values: Sequence[Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in values]).norm()) if values else 0.0
