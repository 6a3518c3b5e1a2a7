"""FedACG: clients start where the server's momentum is about to go, and are held near that point.

G. Kim, J. Kim, B. Han, *Communication-Efficient Federated Learning with Accelerated Client Gradient*, CVPR 2024,
arXiv:2201.03172.

The server sends the look-ahead point θ + λ m, m being its momentum (zero at first). A client starts there, minimises
its loss + β/2 ‖θ_i − (θ + λ m)‖², and the server makes m ← λ m + mean(θ_i − (θ + λ m)), θ ← θ + m. So the new θ is the
mean of the clients' models and m how far it moved: FedAvg's update itself. λ = 0.85 and β = 0.01 are the paper's
values. The mean is that of FedAvg (the paper's is even; ``fedavg.weighting = "uniform"``).

θ and m are sent apart here, because what is sent as the model is also what is evaluated; a server that sent the sum
would need no more bytes than FedAvg. A client without a step returns the look-ahead point.

Sends per client and round: |w| more down (not in the first round). Server state: m, |w| numbers. Client state: nothing.
Extra compute: two passes over the parameters per step. What the server learns: what it learns with FedAvg.
"""

from __future__ import annotations

from pydantic import Field

from fedfa.algorithms.gradients import laid_out_like, pull_to_start
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, ServerStep

_NEEDS_UPDATE = (
    "it takes a client's update for the sum of its steps, and here the look-ahead λ m is part of it; leave out one"
)


class FedACG(Component):
    """The look-ahead start, the pull towards it, and the momentum."""

    name = "fedacg"
    traits = Traits(
        broadcasts=True,
        shared_model=True,
        slot="server optimiser",
        excludes={
            **dict.fromkeys(("scaffold", "feddyn", "fednova"), _NEEDS_UPDATE),
            "fedprox": "it has a proximal term of its own; set algorithm.fedacg.beta",
        },
        late="a late update holds the look-ahead of an older momentum, and would add it a second time",
    )

    momentum: float = Field(0.85, ge=0, lt=1)
    """λ: how far ahead clients start, in units of the last server step; 0 is FedProx with μ = β."""
    beta: float = Field(0.01, ge=0)
    """β of the proximal term around the start."""

    def begin(self, ctx: ClientContext) -> None:
        """Move the network to θ + λ m, and remember that point."""
        ahead = {name: ctx.start[name] for name in ctx.parameters}
        if sent := ctx.broadcast.get(self.name):
            ahead = {name: value + self.momentum * sent[name].to(value) for name, value in ahead.items()}
            ctx.model.load(ahead)
        ctx.scratch[self.name] = {"start": laid_out_like(ctx.parameters, ahead)}

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add β (θ_i − (θ + λ m))."""
        if self.beta:
            pull_to_start(ctx, self.name, self.beta)

    def step(self, server: ServerStep) -> None:
        """The momentum is the server's step; statistics have none."""
        server.state[self.name] = {name: server.update[name].to(server.model[name].dtype) for name in server.trained}
