"""FedRS: a restricted softmax hardly moves the classifier rows of classes that the client does not hold.

X.-C. Li, D.-C. Zhan, *FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data*, KDD 2021.

In local training the logits of absent classes are multiplied by α,

    ψ_c = exp(α_c w_c·h) / Σ_j exp(α_j w_j·h),      α_c = 1 if the client holds class c, else α,

so that their classifier rows are pushed away α times as hard from features that they should not judge. α = 1 is FedAvg;
α = 0 leaves absent rows (and their biases) where they are, while the softmax still counts them with logit 0. The paper
takes α = 0.5 where clients lack some classes, 0.9 and more where they lack few. Evaluation uses the plain logits.

Sends per client and round: what FedAvg sends. Server and client state: nothing. Extra compute per step: one product
with the logits. What the server learns: what it learns with FedAvg; label counts stay on the client.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext


class FedRS(Component):
    """Scale the logits of classes that the client does not hold."""

    name = "fedrs"
    traits = Traits(slot="logit calibration")

    alpha: float = Field(0.5, ge=0, le=1)
    """Scale α of the logits of absent classes; 1 is FedAvg."""

    @property
    def enabled(self) -> bool:
        """With α = 1 this is FedAvg."""
        return self.alpha < 1

    def begin(self, ctx: ClientContext) -> None:
        """The scale of each class: label counts do not change while a client trains."""
        held = (ctx.label_counts > 0).to(ctx.model.head.weight.dtype)
        ctx.scratch[self.name] = {"scale": held + self.alpha * (1 - held)}

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        """The restricted logits; they only enter the local loss."""
        scale: Tensor = ctx.scratch[self.name]["scale"]
        return logits * scale.unsqueeze(-2)
