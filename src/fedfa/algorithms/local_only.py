"""Local training: every client by itself, nothing is shared.

The lower end of every comparison, and what a client gains from taking part is measured against it; for example the
``SingleSet`` rows of X. Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*, ICLR
2021. All clients begin with the same initial weights. With cohorts, a client trains only in the rounds in which it is
drawn, as often as it would in FedAvg; compare with ``cohort.rate = 1`` to let every client train in every round.

There is no global model. What is reported is the mean over the round's clients, each with its own model on the test
samples of its own domains (on all of them where there is one domain: a client that holds two classes of ten then
cannot do better than the share of these two).

Sends per client and round: nothing. Server state: the initial weights. Client state: its whole model (|w| numbers).
Extra compute: none. What the server learns: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Role, Task


class LocalOnly(Component):
    """In place of the averaging: every tensor of the model stays on its client."""

    name = "local"
    traits = Traits(
        aggregates=True,
        excludes={
            "server optimiser": "nothing reaches the server that it could act on; leave out one of the two",
            "fedprox": "there is no global model to stay near; leave out one of the two",
            "moon": "there is no global model to compare features with; leave out one of the two",
            "anchors": "anchors are shared, and training alone shares nothing; leave out one of the two",
            "fedproc": "prototypes are shared, and training alone shares nothing; leave out one of the two",
            "fedproto": "prototypes are shared, and training alone shares nothing; fedproto alone leaves models local",
            "fedbn": "the whole model stays on its client already, normalisation layers too; leave out one of the two",
        },
    )

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Local, all of it; only what the network's author switched off stays frozen."""
        frozen = {name for name, parameter in task.model.module.named_parameters() if not parameter.requires_grad}
        return {name: Role.LOCAL for name in task.model.state() if name not in frozen}
