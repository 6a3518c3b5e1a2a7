"""FedAvg: clients train, the server averages.

B. McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, AISTATS 2017.

Sends per client and round: the model down, its change and a weight up. Server keeps: the model. Client keeps: nothing.
What the server learns: each client's update and (with ``weighting = "samples"``) its number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedfa.algorithms.method import AUTHORS_TRAINING, Method
from fedfa.learning.part import ClientContext, Options, Part, ServerStep
from fedfa.learning.sums import WeightedSum


class AveragingOptions(Options):
    """Options of the averaging."""

    weighting: Literal["samples", "uniform"] = "samples"
    """Weight of a client: its number of samples, or one for all."""


class Averaging(Part[AveragingOptions]):
    """The base of most methods: ``w ← w + Σ n_i (w_i − w) / Σ n_i``, which is ``Σ n_i w_i / Σ n_i``."""

    name = "fedavg"
    options_type = AveragingOptions
    base = True
    contributes_update_only = True

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """``n_i (w_i − w)`` and ``n_i``."""
        weight = ctx.size if self.options.weighting == "samples" else 1
        return {"model": WeightedSum.of(ctx.update, weight)}

    def step(self, server: ServerStep) -> None:
        """The weighted mean of the updates."""
        server.update = server.total.mean(f"{self.name}/model")


FEDAVG = Method(
    name="fedavg",
    summary="Federated averaging (McMahan et al. 2017): the weighted mean of the clients' models.",
    parts=(Averaging,),
    variants={
        "paper": {},
        # In the authors' code FedAvg alone has a weight decay ten times smaller than every other method.
        "authors": {**AUTHORS_TRAINING, "local.weight_decay": 0.0001},
    },
)
