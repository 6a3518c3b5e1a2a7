"""FedRep: a shared representation, and a classifier for each client.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, *Exploiting Shared Representations for Personalized Federated
Learning*, ICML 2021, arXiv:2102.07078, Algorithm 1. In each round a client first trains its classifier (the head) with
the received representation fixed, for many steps, and then the representation with the head fixed, for few. Only the
representation is sent and averaged; a head never leaves its client.

Of a round's ``local.epochs`` the last ``body_epochs`` train the representation and those before them the head (the
paper: ten for the head, one or five for the representation). A tensor that is fixed is left alone entirely, by weight
decay too. A client that was never drawn still has the initial head.

There is no global model: what is reported is the mean over the round's clients, each with its own head; ``own_data``
has them on their own distributions, which is what the paper reports.

Sends per client and round: the model without the classifier, down and up. Server state: the representation. Client
state: its classifier (C·d + C numbers). Extra compute: none. What the server learns: what it learns in FedAvg, without
the classifiers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from fedfa.errors import AlgorithmError
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, Role, Task
from fedfa.learning.local_loop import batches_of_each_epoch
from fedfa.learning.tensors import Tensors


class FedRep(Component):
    """The classifier stays on its client; each round trains it first, the representation after it."""

    name = "fedrep"
    traits = Traits(shared_model=True)

    body_epochs: int = Field(1, ge=1)
    """Epochs of a round, the last ones, that train the representation."""

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Local: the classifier."""
        return dict.fromkeys(task.model.head_tensors, Role.LOCAL)

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """Refuse rounds that would not train the head."""
        local = task.local
        if local is not None and local.steps is None and local.epochs <= self.body_epochs:
            raise AlgorithmError(
                f"fedrep trains the classifier for local.epochs − body_epochs = {local.epochs} − {self.body_epochs} "
                "epochs of a round; raise local.epochs, e.g. to 5"
            )
        return {}

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Leave alone what is fixed in this epoch: a parameter without a gradient does not move."""
        head = {id(parameter) for parameter in ctx.model.head.parameters()}
        trains_head = ctx.epoch < len(batches_of_each_epoch(ctx)) - self.body_epochs
        for parameter in ctx.model.module.parameters():
            if (id(parameter) in head) is not trains_head:
                parameter.grad = None
