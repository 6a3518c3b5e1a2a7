"""FedProto: clients exchange class prototypes instead of models.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, *FedProto: Federated Prototype Learning across
Heterogeneous Clients*, AAAI 2022, arXiv:2105.00243. Equation numbers below are the paper's.

A client's prototype of a class is the mean of its features of that class (3). The server averages them over the clients
that hold the class (6), and clients train with cross-entropy + λ · distance to the global prototypes (7, 8). Models
never leave the clients; a prediction is the class of the nearest global prototype (4). ``average_model = true`` makes
it a regulariser on top of FedAvg instead: the model is averaged and its classifier predicts.

Text and published code differ in three places, and each is an option. The distance: the code's mean square over
samples and dimensions (default), or the text's L2 distance of class means, summed over classes. The prototypes: the
code's means over the last local epoch's features, gathered while training (default), or a pass with the trained model,
eq. 3 to the letter. The server's mean: eq. 6 divides the n_ij/n_j-weighted sum once more by the number of clients,
which would shrink every prototype, so it is taken to be the weighted mean (default); the code gives every client the
same weight. A class that has no global prototype yet adds nothing to the distance.

No global model exists unless it is averaged: the accuracy that is reported is the mean over the round's clients, each
with its own network, on all classes.

Sends per client and round: C·d numbers down and up with C counts up, and the model only with ``average_model``. Server
state: the prototypes. Client state: its model (not with ``average_model``). Extra compute: O(batch·C·d) per step; with
``prototypes = "full-pass"`` one forward pass over the client's data per round.
What the server learns: each client's class means and how many samples of each class it holds (unless it only ever sees
secure sums).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedfa.algorithms.class_features import class_sums, membership
from fedfa.algorithms.prototypes import feature_pass, no_prototypes, prototype_sum, renew_prototypes
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, Role, ServerStep, Task
from fedfa.learning.tensors import ComponentTensors, Tensors


class FedProto(Component):
    """One prototype per class: exchanged, averaged, approached, and used to predict."""

    name = "fedproto"
    traits = Traits(broadcasts=True, class_states=("prototypes",))

    lam: float = Field(1.0, ge=0)
    """Weight λ of the distance to the global prototypes (eq. 7)."""
    per: Literal["sample", "class"] = Field("sample", alias="loss")
    """``sample``: (h − p_y)², mean over samples and dimensions. ``class``: eq. 8, the L2 distance of the batch's class
    mean, summed over the classes in the batch."""
    average_model: bool = False
    """Average the model as FedAvg does and let its classifier predict; without it every client has its own model."""
    prototypes: Literal["last-epoch", "full-pass"] = "last-epoch"
    """Class means of the last local epoch's features in training, or of one pass with the trained model."""
    weights: Literal["count", "uniform"] = "count"
    """Weights of the server's mean over the clients that hold a class: their samples of it, or one for all."""

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """No class has a prototype yet."""
        return no_prototypes(task)

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Published: everything that is trained or gathered stays on its client."""
        if self.average_model:
            return {}
        frozen = {name for name, parameter in task.model.module.named_parameters() if not parameter.requires_grad}
        return {name: Role.LOCAL for name in task.model.state() if name not in frozen}

    def begin(self, ctx: ClientContext) -> None:
        """Nothing gathered yet."""
        broadcast = ctx.broadcast[self.name]["prototypes"]
        ctx.scratch[self.name] = {
            "epoch": -1,
            "sums": (torch.zeros_like(broadcast), torch.zeros_like(broadcast[..., :1])),
        }

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Cross-entropy + λ · distance to the global prototypes (eq. 7)."""
        if self.lam == 0:
            return loss
        prototypes, known = ctx.broadcast[self.name]["prototypes"], ctx.broadcast[self.name]["known"]
        if self.per == "sample":
            distance = (known[batch.y] * (batch.features - prototypes[batch.y])).square().mean(-1).mean(-1)
        else:
            sums, counts = class_sums(batch.features, membership(batch.y, ctx.num_classes, batch.features))
            apart = torch.linalg.vector_norm(sums / counts.clamp(min=1) - prototypes, dim=-1, keepdim=True)
            distance = (apart * known * (counts > 0)).sum((-2, -1))
        return loss + self.lam * distance

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Gather the class features of the epoch; only the last one's are sent."""
        if self.prototypes != "last-epoch":
            return
        mine = ctx.scratch[self.name]
        found = class_sums(batch.features.detach(), membership(batch.y, ctx.num_classes, batch.features))
        if mine["epoch"] != ctx.epoch:
            mine["epoch"], mine["sums"] = ctx.epoch, found
        else:
            mine["sums"] = (mine["sums"][0] + found[0], mine["sums"][1] + found[1])

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The client's prototypes (eq. 3)."""
        full_pass = self.prototypes == "full-pass"
        sums, counts = feature_pass(ctx) if full_pass else ctx.scratch[self.name]["sums"]
        return {"prototypes": prototype_sum(sums / counts.clamp(min=1), counts, self.weights)}

    def step(self, server: ServerStep) -> None:
        """The global prototypes: the mean over the clients that hold the class (eq. 6)."""
        renew_prototypes(server, self.name)

    def predict(self, broadcast: ComponentTensors, features: Tensor, logits: Tensor) -> Tensor:
        """The nearest global prototype in L2 (eq. 4); the classifier if the model is averaged or there is none yet."""
        if self.average_model:
            return logits
        prototypes, known = broadcast[self.name]["prototypes"], broadcast[self.name]["known"]
        distance = torch.cdist(features, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = (-distance).masked_fill(known.mT == 0, -torch.inf)
        return torch.where(known.any(), nearest, logits)
