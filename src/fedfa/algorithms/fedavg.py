"""FedAvg: clients train, the server averages.

B. McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, AISTATS 2017.

Sends per client and round: the model down, its change and a weight up. Server state: the model. Client state: nothing.
What the server learns: each client's update and (with ``weighting = "samples"``) its number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ClientContext, ServerStep


class FedAvg(Component):
    """The base of most methods: ``w ← w + Σ n_i (w_i − w) / Σ n_i``, which is ``Σ n_i w_i / Σ n_i``."""

    name = "fedavg"
    traits = Traits(aggregates=True)

    weighting: Literal["samples", "uniform"] = "samples"
    """Weight of a client: its number of samples, or one for all."""

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """``n_i (w_i − w)`` and ``n_i``."""
        weight = ctx.size if self.weighting == "samples" else 1
        return {"model": WeightedSum.of(ctx.update, weight)}

    def step(self, server: ServerStep) -> None:
        """The weighted mean of the updates."""
        server.update = server.aggregate.mean(f"{self.name}/model")
