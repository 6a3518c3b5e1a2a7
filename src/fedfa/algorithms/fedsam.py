"""FedSAM: clients descend with the gradient at the worst point nearby, towards flat minima.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu, *Generalized Federated Learning via Sharpness Aware Minimization*, ICML
2022, arXiv:2206.02618; also D. Caldarola, B. Caputo, M. Ciccone, ECCV 2022. The step itself is P. Foret et al.'s,
*Sharpness-Aware Minimization for Efficiently Improving Generalization*, ICLR 2021.

A local step is w ← w − η ∇f(w + ρ g/‖g‖) with g = ∇f(w), both on the same batch. f is the whole local loss: terms of
other components are evaluated again at the moved weights, also those that earlier components add as gradients
(FedProx, FedDyn, SCAFFOLD). Weight decay is the optimiser's and acts at w. Where g vanishes there is no direction and
nothing moves. Only weights that are trained and shared move; BatchNorm's statistics see both passes.

Sends per client and round: what FedAvg sends. Server and client state: nothing. Extra compute: each step takes a
second forward and backward pass. It serves one client at a time, so it is never stacked. What the server learns: what
it learns with FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext


class FedSAM(Component):
    """The gradient at the worst point within ρ of the weights."""

    name = "fedsam"

    rho: float = Field(0.05, ge=0)
    """Radius ρ; 0 is FedAvg."""

    @property
    def enabled(self) -> bool:
        """Without ρ this is FedAvg."""
        return self.rho > 0

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Replace ∇f(w) by ∇f(w + ρ g/‖g‖)."""
        moved: list[Tensor] = [parameter for parameter in ctx.parameters.values() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
        length = float(torch.stack([gradient.norm() for gradient in gradients]).norm()) if gradients else 0.0
        if length == 0:
            return
        weights = [parameter.detach().clone() for parameter in moved]
        with torch.no_grad():
            torch._foreach_add_(moved, gradients, alpha=self.rho / length)
        ctx.recompute_gradients(batch)
        with torch.no_grad():
            torch._foreach_copy_(moved, weights)
