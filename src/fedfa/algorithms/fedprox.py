"""FedProx: local training is held near the global model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, *Federated Optimization in Heterogeneous Networks*,
MLSys 2020.

Each client minimises its loss plus μ/2 ‖w − w_t‖² (the paper's eq. 2), w_t being the model it received. The term's
gradient μ (w − w_t) is added to the loss's after the backward pass: no graph is built for it, and the training loss
that is recorded is that of the data alone, comparable between values of μ. Only parameters that are shared are held;
those a client keeps have no global counterpart. The server averages as FedAvg does (the original draws clients in
proportion to their samples and averages evenly, which agrees for equal sizes). That clients may do partial work is a
liberty the paper gives, not a step of the method; clients here do all their epochs.

Sends per client and round: |w| down, |w| up, as FedAvg. Server and client state: none. Extra compute: two passes
over the parameters per step. What the server learns: what it learns in FedAvg.
"""

from __future__ import annotations

from pydantic import Field

from fedfa.algorithms.gradients import pull_to_start, remember_start
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext


class FedProx(Component):
    """The proximal term, as its gradient."""

    name = "fedprox"
    traits = Traits(shared_model=True)

    mu: float = Field(0.1, ge=0)
    """μ of μ/2 ‖w − w_t‖² (FedFA's paper: μ/2 = 0.05). 0 is FedAvg, bit for bit."""

    @property
    def enabled(self) -> bool:
        """Without μ this is FedAvg."""
        return self.mu > 0

    def begin(self, ctx: ClientContext) -> None:
        """Remember w_t."""
        remember_start(ctx, self.name)

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Add μ (w − w_t)."""
        pull_to_start(ctx, self.name, self.mu)
