"""FedDyn: a dynamic regulariser makes the clients' optima agree with the global one.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, *Federated Learning Based on
Dynamic Regularization*, ICLR 2021, Algorithm 1.

A client minimises L_i(θ) − ⟨g_i, θ⟩ + α/2 ‖θ − θ_t‖² and then renews its dual state g_i ← g_i − α (θ_i − θ_t), which at
a minimum of that objective is ∇L_i(θ_i). The server's h is the mean of the dual states of **all** m clients, so only
the active ones move it: h ← h − α/m Σ_active (θ_i − θ_t); its model is θ = mean over the active of θ_i − h/α. If
everything settles, θ_i = θ for all clients, hence h = 0 and Σ_i ∇L_i(θ) = 0: a stationary point of the sum, whatever
the clients' data. (FedAvg with several local steps settles elsewhere.)

- Clients count equally, in the mean as in the objective Σ_i L_i, where FedAvg weighs clients by their samples: on
  unequal clients the two differ in objective too. Acar et al.'s code divides α by the client's weight n_i/n̄, n̄ being
  the mean size of all clients; ``mean_size`` = n̄ does the same. Mean and shift stay even, so what settles has
  mean g_i/α_i = 0, and with g_i = ∇L_i that is Σ_i n_i ∇L_i = 0: FedAvg's objective. With equal sizes the forms agree.
- Weight decay belongs to L_i, as in their code: the dual state then holds the gradient of the decayed loss, and the
  stationary point is that of the decayed sum. The α-term is separate from it.
- α = 0 leaves no regulariser and no dual state: FedAvg with equal weights, bit for bit.
- The model that is sent, evaluated and reported is θ. The published code also reports the mean of the active clients'
  models, which lacks the shift by h/α. It clips gradients at norm 10; Algorithm 1 does not, and neither does this file.
- h is kept in double precision: θ holds h/α, so a small α would magnify its rounding.

Sends per client and round: |w| down, |w| up, as FedAvg. Server state: h, |w| numbers. Client state: g_i, |w| numbers,
also through the rounds in which it does not take part. Extra compute: three passes over the parameters per step. What
the server learns: what it learns in FedAvg (g_i is a sum of updates it has seen).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field

from fedfa.algorithms.gradients import add_to_gradients, laid_out_like, pull_to_start, remember_start
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, ServerStep


class FedDyn(Component):
    """Dual states on the clients, their mean on the server."""

    name = "feddyn"
    traits = Traits(
        aggregates=True,
        shared_model=True,
        excludes={
            "server optimiser": "its server step θ = mean − h/α is part of the method, and the clients' dual states "
            "fit no other; leave the server optimiser out",
            "fedprox": "it has a proximal term of its own; set algorithm.feddyn.alpha",
        },
        exact=("*",),  # h stays the mean of the clients' dual states
        late="the server's h and the clients' dual states refer to the model of one round, which all of it must share",
    )

    alpha: float = Field(0.1, ge=0)
    """α (FedFA's paper: μ/2 = 0.05). 0 is FedAvg with equal weights."""
    mean_size: float | None = Field(None, gt=0)
    """Mean number of samples of all clients: a client of n_i samples then has α_i = α · mean_size / n_i, and the
    objective is weighted by samples, as in the published code. Left out, α is the same for all."""

    def begin(self, ctx: ClientContext) -> None:
        """Remember θ_t, and g_i if there is one yet (it starts as zero)."""
        if self.alpha:
            remember_start(ctx, self.name)
            dual = ctx.client_state.get(self.name)
            ctx.scratch[self.name]["dual"] = laid_out_like(ctx.parameters, dual) if dual else None

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add −g_i + α (θ − θ_t)."""
        if self.alpha:
            pull_to_start(ctx, self.name, self._alpha_of(ctx))
            if (dual := ctx.scratch[self.name]["dual"]) is not None:
                add_to_gradients(ctx.parameters.values(), dual, -1.0)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """θ_i − θ_t, each client with weight one; and g_i ← g_i − α (θ_i − θ_t)."""
        if self.alpha:
            dual = ctx.client_state.setdefault(self.name, {})
            for name in ctx.parameters:
                old = dual.get(name, torch.zeros_like(ctx.update[name]))
                dual[name] = old - self._alpha_of(ctx) * ctx.update[name]
        return {"model": WeightedSum.of(ctx.update, 1)}

    def step(self, server: ServerStep) -> None:
        """The active clients' mean, shifted by −h/α; statistics are only averaged."""
        group, alpha, h = f"{self.name}/model", self.alpha, server.state[self.name]
        server.update = server.aggregate.mean(group)
        if not alpha:
            return
        for name in server.trained:
            of_all = server.aggregate[group].tensors[name] / server.num_clients  # (1/m) Σ_active (θ_i − θ_t)
            h[name] = h.get(name, torch.zeros_like(of_all)) - alpha * of_all
            server.update[name] = server.update[name] - h[name] / alpha

    def _alpha_of(self, ctx: ClientContext) -> float:
        """α_i of this client; the server's step needs α alone, because h/α is the mean of all g_i/α_i."""
        return self.alpha if self.mean_size is None else self.alpha * self.mean_size / max(ctx.size, 1)
