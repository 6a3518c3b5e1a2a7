"""FedNTD: what the global model says about the classes a sample does not have is preserved.

G. Lee, M. Jeong, Y. Shin, S. Bae, S.-Y. Yun, *Preservation of the Global Knowledge by Not-True Distillation in
Federated Learning*, NeurIPS 2022, arXiv:2106.03097.

Local training forgets what the client's data do not show. Its loss is therefore (the paper's eq. 3 and 4)

    cross-entropy + β · KL(q̃_g ‖ q̃),      q̃(c) = exp(z_c/τ) / Σ_{c'≠y} exp(z_c'/τ)   for c ≠ y,

the mean over the batch; q̃ is the softmax of the local logits over the classes other than the sample's own, q̃_g that of
the received model. The true class is left to the cross-entropy alone. β = τ = 1 are the paper's values. (The published
code also multiplies the term by τ², as distillation often does.) The received model's logits are computed once per
round, in evaluation mode. With two classes there is one other class, and the term is zero.

Sends per client and round: what FedAvg sends. Server and client state: nothing. Extra compute: a forward pass over the
client's data per round, O(batch·C) per step. What the server learns: what it learns with FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext
from fedfa.stacking.products import rows


class FedNTD(Component):
    """The not-true distillation loss."""

    name = "fedntd"
    traits = Traits(shared_model=True)

    beta: float = Field(1.0, ge=0)
    """Weight β of the distillation; 0 is FedAvg."""
    tau: float = Field(1.0, gt=0)
    """Temperature τ of both softmaxes."""

    @property
    def enabled(self) -> bool:
        """Without β this is FedAvg."""
        return self.beta > 0

    def begin(self, ctx: ClientContext) -> None:
        """The logits of the received model."""
        ctx.scratch[self.name] = {"teacher": ctx.logits(ctx.start)}

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Cross-entropy + β · mean of the divergences."""
        teacher = rows(ctx.scratch[self.name]["teacher"], batch.index)
        return loss + self.beta * not_true_divergence(batch.logits, teacher, batch.y, self.tau).mean(-1)


def not_true_divergence(logits: Tensor, teacher: Tensor, labels: Tensor, tau: float) -> Tensor:
    """KL(q̃_g ‖ q̃) of each sample.

    Args:
        logits: Local logits, ``[…, B, C]``.
        teacher: Those of the received model.
        labels: ``[…, B]``.
        tau: τ.
    """
    others = torch.arange(logits.shape[-1] - 1, device=logits.device).expand(*labels.shape, -1)
    others = others + (others >= labels.unsqueeze(-1))  # the classes but the sample's own, in order
    local, received = ((scores.gather(-1, others) / tau).log_softmax(-1) for scores in (logits, teacher))
    return (received.exp() * (received - local)).sum(-1)
