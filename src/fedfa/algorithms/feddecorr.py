"""FedDecorr: features are kept from collapsing into few directions.

Y. Shi, J. Liang, W. Zhang, V. Y. F. Tan, S. Bai, *Towards Understanding and Mitigating Dimensional Collapse in
Heterogeneous Federated Learning*, ICLR 2023, arXiv:2210.00226.

Under label skew the features of a client, and with them those of the global model, occupy ever fewer dimensions. The
local loss is cross-entropy + β/d² ‖K‖_F², K being the correlation matrix of the d features within the batch. The
trace of K is fixed, so ‖K‖_F² is least where all singular values of K are equal, that is, where features are
uncorrelated. β = 0.1 is the paper's value. (Its published code leaves out the diagonal, which is constant, divides by
the d² − d other entries, and by the batch's size instead of its square.)

K is Z^T Z / B with Z the features minus their mean, divided by √(variance + 1e-8): a feature that is constant in the
batch (a dead ReLU) counts as zero. A batch of a single sample has no correlations and adds nothing.

Sends per client and round: what FedAvg sends. Server and client state: nothing. Extra compute: O(batch²·d) per step.
What the server learns: what it learns with FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext


class FedDecorr(Component):
    """The decorrelation loss on the features."""

    name = "feddecorr"

    beta: float = Field(0.1, ge=0)
    """Weight β of the decorrelation; 0 is FedAvg."""

    @property
    def enabled(self) -> bool:
        """Without β this is FedAvg."""
        return self.beta > 0

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Cross-entropy + β/d² ‖K‖_F²."""
        return loss + self.beta * correlation_energy(batch.features) if len(batch.y) > 1 else loss


def correlation_energy(features: Tensor) -> Tensor:
    """‖K‖_F² / d² of features ``[B, d]``.

    Example:
        >>> alike = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
        >>> round(float(correlation_energy(alike)), 4)  # both correlations are one: four entries of four
        1.0
    """
    size, dim = features.shape
    centred = features - features.mean(0)
    z = centred / torch.sqrt(centred.square().mean(0) + 1e-8)
    # ‖Z^T Z‖ = ‖Z Z^T‖: the smaller of the two products.
    products = z @ z.mT if size < dim else z.mT @ z
    return products.square().sum() / (size * dim) ** 2
