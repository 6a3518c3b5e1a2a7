"""Averaging over rounds: the model that is evaluated is a moving average of the model that is trained.

The average of the iterates of stochastic descent is nearer to the optimum than the last of them (B. T. Polyak, A. B.
Juditsky, *Acceleration of Stochastic Approximation by Averaging*, SIAM Journal on Control and Optimization 1992). In a
federation the cohort is a source of noise of its own: ten clients of two classes each lack any one of ten classes in
about every tenth round.

With z the model that clients receive and train, Δ the server's update of any method, and x the evaluated model,

    z ← z + Δ,    x ← x + r_t (z − x),    r_t = max(rate, 1/(t + 1)),

so x is the plain mean of all rounds at first, and later a mean over about the last 1/rate of them. The training of z is
that of the method alone, bit for bit but for the rounding of x + (z − x). Statistics (BatchNorm) are not averaged.

Sends per client and round: nothing besides what the rest of the algorithm sends. Server state: z − x, |w| numbers, in
double precision. Client state: nothing. Extra compute: a pass over the model per round, on the server. What the server
learns: nothing more.
"""

from __future__ import annotations

import torch
from pydantic import Field

from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ServerStep


class Averaging(Component):
    """Keeps how far the trained model is ahead of the evaluated one."""

    name = "averaging"
    traits = Traits(shared_model=True, ahead=True)

    rate: float = Field(0.1, gt=0, le=1)
    """How far the evaluated model moves to the trained one in a round; 1 evaluates the trained model itself."""

    @property
    def enabled(self) -> bool:
        """Only where the two models differ."""
        return self.rate < 1

    def step(self, server: ServerStep) -> None:
        """Split the way from x to the new z: a part for x, the rest z − x is ahead of it, which clients receive too."""
        rate, state = max(self.rate, 1 / (server.round + 1)), server.state[self.name]
        for name in server.trained:
            update = server.update[name].double()
            way = state.get(name, torch.zeros_like(update)) + update
            server.update[name] = rate * way
            state[name] = (1 - rate) * way
