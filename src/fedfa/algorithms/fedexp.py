"""FedExP: the server steps further where clients' updates point apart.

D. Jhunjhunwala, S. Wang, G. Joshi, *FedExP: Speeding Up Federated Averaging via Extrapolation*, ICLR 2023,
arXiv:2301.09604, Algorithm 1.

With Δ_i the clients' updates, Δ̄ their mean with weights p_i (FedAvg's),

    w ← w + η_g Δ̄,      η_g = max(1, Σ_i p_i ‖Δ_i‖² / (2 (‖Δ̄‖² + ε))).

Equal updates give ½ and so FedAvg's step; M orthogonal updates of one length give M/2. Norms are taken over what
clients train; statistics are averaged. ε keeps the step finite where updates cancel. The paper also reports the mean of
the last two models, which smooths the oscillation of large steps; here the model itself is reported.

Sends per client and round: |w| down, |w| + 1 up: ‖Δ_i‖², in a sum as everything else. Server and client state: nothing.
Extra compute: one pass over the update per round. What the server learns: besides FedAvg's update its length, which
follows from it; of secure sums the mean length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field

from fedfa.algorithms.fedavg import FedAvg
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Traits
from fedfa.learning.context import ClientContext, ServerStep

_ONE_MODEL = "its step length compares the updates of one model with their mean"


class FedExP(FedAvg):
    """FedAvg with an extrapolated server step."""

    name = "fedexp"
    traits = Traits(aggregates=True, shared_model=True, slot="server optimiser", late=_ONE_MODEL)

    epsilon: float = Field(0.001, ge=0)
    """ε of the denominator, in units of squared updates."""

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """FedAvg's contribution, and ‖Δ_i‖² with the same weight."""
        model = super().contribute(ctx)["model"]
        lengths = [ctx.update[name].double().square().sum() for name in ctx.parameters]
        squared = torch.stack(lengths).sum() if lengths else torch.zeros((), dtype=torch.float64)
        return {"model": model, "length": WeightedSum.of({"squared": squared}, model.weight)}

    def step(self, server: ServerStep) -> None:
        """η_g times the mean update."""
        super().step(server)
        of_mean = sum(float(server.update[name].double().square().sum()) for name in server.trained)
        of_clients = float(server.aggregate.mean(f"{self.name}/length")["squared"])
        step = max(1.0, of_clients / (2 * (of_mean + self.epsilon))) if of_mean > 0 else 1.0
        for name in server.trained:
            server.update[name] = step * server.update[name]
