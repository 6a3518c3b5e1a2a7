"""MOON: model-contrastive federated learning.

Q. Li, B. He, D. Song, *Model-Contrastive Federated Learning*, CVPR 2021, arXiv:2103.16257.

A client pulls the features z of its network towards those of the global model (z_glob) and away from those of its own
model at the end of its previous round (z_prev). For each sample, with the cosine similarity (the paper's eq. 3),

    ℓ_con = − log( exp(sim(z, z_glob)/τ) / (exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ)) ),

and the local loss is the cross-entropy plus μ times the mean of ℓ_con (eq. 4). The logarithm is taken per sample; the
logarithm of a ratio of batch means, which some code computes, is another function. Features are what enters the
classifier; the original puts a projection head before it. A client's first round has no previous model; the global one
stands in for it, so ℓ_con is log 2 whatever the network does: nothing is computed, the constant is reported.

μ = 1 is the FedFA paper's setting except on CIFAR-10, where it has 5; the presets of CIFAR-10 set it.

Sends per client and round: what FedAvg sends. Server state: the model. Client state: its previous local model, |w|
numbers. Extra compute: two forward passes over the client's data per round (none in its first), O(batch·d) per step.
What the server learns: what it learns with FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext
from fedfa.learning.tensors import clone
from fedfa.stacking.products import rows

ZERO_FEATURES = 1e-8
"""Features shorter than this have no direction; their similarity to anything tends to 0."""


class MOON(Component):
    """The model-contrastive loss, and the previous local model it needs."""

    name = "moon"
    traits = Traits(shared_model=True)

    mu: float = Field(1.0, ge=0)
    """Weight μ of the model-contrastive loss; 0 is FedAvg."""
    tau: float = Field(0.5, gt=0)
    """Temperature τ of the similarities."""

    @property
    def enabled(self) -> bool:
        """Without μ this is FedAvg."""
        return self.mu > 0

    def begin(self, ctx: ClientContext) -> None:
        """The features of the two fixed models, once per round: they do not change while the client trains."""
        ctx.scratch[self.name] = {"contrast": None}
        if not (previous := ctx.client_state.get(self.name)):
            return
        glob, prev = (
            functional.normalize(ctx.features(weights), dim=-1, eps=ZERO_FEATURES) for weights in (ctx.start, previous)
        )
        ctx.scratch[self.name]["contrast"] = prev - glob

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Cross-entropy + μ · mean of ℓ_con (eq. 4)."""
        contrast: Tensor | None = ctx.scratch[self.name]["contrast"]
        if contrast is None:  # previous = global: both similarities are the same
            return loss + self.mu * math.log(2)
        each = model_contrastive_loss(batch.features, rows(contrast, batch.index), self.tau)
        return loss + self.mu * each.mean(-1)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """Nothing goes to the server. The network is final now: the client keeps it for its next round."""
        ctx.client_state[self.name] = clone(ctx.model.state())
        return {}


def model_contrastive_loss(features: Tensor, contrast: Tensor, tau: float) -> Tensor:
    """ℓ_con of each sample.

    Dividing by the numerator, ℓ_con = log(1 + exp((sim(z, z_prev) − sim(z, z_glob))/τ)), and the difference of the
    two cosines is one dot product with the difference of the two unit vectors.

    Args:
        features: z, ``[…, d]``.
        contrast: z_prev/‖z_prev‖ − z_glob/‖z_glob‖, ``[…, d]``.
        tau: τ.
    """
    direction = functional.normalize(features, dim=-1, eps=ZERO_FEATURES)
    difference = (direction * contrast).sum(-1) / tau
    # log(1 + exp(x)) as a softmax of (0, x): row by row, so that no sample's last digit depends on how many there are.
    return -functional.pad(difference.unsqueeze(-1), (1, 0)).log_softmax(-1)[..., 0]
