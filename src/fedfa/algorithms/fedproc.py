"""FedProc: prototypical contrastive federated learning.

X. Mu, Y. Shen, K. Cheng, X. Geng, J. Fu, T. Zhang, Z. Zhang, *FedProc: Prototypical Contrastive Federated Learning on
Non-IID Data*, Future Generation Computer Systems 143, 2023, arXiv:2109.12273.

The server has a global prototype p_c per class. A client pulls the features z of a sample to the prototype of its class
and away from the others,

    ℓ_gpc = − log( exp(cos(z, p_y)/τ) / Σ_c exp(cos(z, p_c)/τ) ),

and trains with (1 − t/T)·ℓ_gpc + (t/T)·cross-entropy: the features first, the classifier later. t counts the rounds
that are done, T is the planned number. (The FedFA paper prints ℓ_gpc without its minus sign; minimised like that it
would push features away from their own prototype.) Features are what enters the classifier; the original puts a
projection before it.

Prototypes are class means of features. As published a client computes them by one pass with its trained model
(``prototypes = "full-pass"``); the FedFA paper found that to diverge and gathers them as it gathers its anchors, with
a momentum over local epochs (``"momentum"``, the default; its eq. 7). The server takes the mean over the clients that
hold a class, weighted with their samples of it, which is the mean over all these samples; a class nobody held keeps its
prototype. A class that has none yet is no part of the sum over c, and the share of the loss that its samples would have
had in ℓ_gpc stays with the cross-entropy: the first round is plain cross-entropy, in which prototypes are gathered.

Sends per client and round, besides the model: C·d numbers down and up, with C counts up. Server state: the prototypes.
Client state: nothing. Extra compute: O(batch·C·d) per step; with ``"full-pass"`` also one forward pass over the
client's data per round.
What the server learns: each client's class means and how many samples of each class it holds (unless it only ever sees
secure sums).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedfa.algorithms.class_features import ClassFeatures
from fedfa.algorithms.prototypes import feature_pass, no_prototypes, prototype_sum, renew_prototypes
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, ServerStep, Task
from fedfa.learning.tensors import Tensors
from fedfa.stacking.products import product


class FedProc(Component):
    """One prototype per class, the loss that contrasts features with them, and their renewal."""

    name = "fedproc"
    traits = Traits(broadcasts=True, horizon=True, class_states=("prototypes",))

    tau: float = Field(0.5, gt=0)
    """Temperature τ of the similarities."""
    prototypes: Literal["momentum", "full-pass"] = "momentum"
    """``momentum``: class features gathered while training, averaged over epochs as FedFA's are. ``full-pass``: class
    means of one pass with the trained model (published)."""
    momentum: float = Field(0.5, ge=0, le=1)
    """λ of that average over epochs, which starts from the received prototype."""
    weights: Literal["count", "uniform"] = "count"
    """Weights of the server's mean over the clients that hold a class: their samples of it, or one for all."""

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """No class has a prototype yet."""
        return no_prototypes(task)

    def begin(self, ctx: ClientContext) -> None:
        """This round's weight of the contrast, and the directions of the prototypes."""
        prototypes, known = ctx.broadcast[self.name]["prototypes"], ctx.broadcast[self.name]["known"]
        ctx.scratch[self.name] = {
            "weight": contrast_weight(ctx.round, ctx.rounds) if bool(known.any()) else 0.0,
            "directions": functional.normalize(prototypes, dim=-1),
            "features": ClassFeatures(prototypes),
            "present": torch.zeros_like(known, dtype=torch.bool),
        }

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """(1 − t/T) · ℓ_gpc + (t/T) · cross-entropy."""
        mine = ctx.scratch[self.name]
        weight: float = mine["weight"]
        if weight == 0:
            return loss
        known = ctx.broadcast[self.name]["known"]
        each = prototype_contrastive_loss(batch.features, batch.y, mine["directions"], known, self.tau)
        share = known[batch.y].squeeze(-1).mean(-1)  # of the batch: 1 as soon as all its classes have prototypes
        return (1 - weight * share) * loss + weight * each.mean(-1)

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Gather the class features of the forward pass."""
        if self.prototypes == "momentum":
            ctx.scratch[self.name]["features"].add(batch.features, batch)

    def after_epoch(self, ctx: ClientContext) -> None:
        """The average over epochs; a class without prototype has nothing to remember, its latest epoch counts alone."""
        if self.prototypes == "momentum":
            mine = ctx.scratch[self.name]
            features: ClassFeatures = mine["features"]
            features.add_waiting()
            mine["present"] = mine["present"] | (features.epoch["count"] > 0)
            features.previous = mean = features.end_epoch()
            averaged = self.momentum * features.averaged + (1 - self.momentum) * mean
            features.averaged = torch.where(ctx.broadcast[self.name]["known"] > 0, averaged, mean)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The client's prototypes of the classes in its batches."""
        if self.prototypes == "full-pass":
            sums, counts = feature_pass(ctx)
            return {"prototypes": prototype_sum(sums / counts.clamp(min=1), counts, self.weights)}
        mine = ctx.scratch[self.name]
        averaged = mine["features"].averaged
        counts = (ctx.label_counts.unsqueeze(-1) * mine["present"]).to(averaged.dtype)
        return {"prototypes": prototype_sum(averaged, counts, self.weights)}

    def step(self, server: ServerStep) -> None:
        """The global prototypes: the mean over the clients that hold the class."""
        renew_prototypes(server, self.name)


def contrast_weight(round: int, rounds: int) -> float:
    """1 − t/T, the weight of ℓ_gpc when ``round`` of ``rounds`` rounds are done."""
    return max(0.0, 1 - round / rounds)


def prototype_contrastive_loss(features: Tensor, y: Tensor, directions: Tensor, known: Tensor, tau: float) -> Tensor:
    """ℓ_gpc of each sample; 0 for samples of a class that has no prototype.

    Args:
        features: z, ``[…, batch, d]``.
        y: Labels, ``[…, batch]``.
        directions: Prototypes of length one, ``[C, d]``.
        known: Which of them exist, ``[C, 1]``; at least one.
        tau: τ.
    """
    similarity = product(functional.normalize(features, dim=-1, eps=1e-8), directions.mT) / tau
    similarity = similarity.masked_fill(known.mT == 0, -torch.inf)
    each = -similarity.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return torch.where(known[y].squeeze(-1) > 0, each, 0.0)
