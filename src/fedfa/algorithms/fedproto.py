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

Sends per client and round: C·d numbers each way with C counts up, and the model only with ``average_model``. Server
keeps: the prototypes. Client keeps: its model (not with ``average_model``). Extra compute: O(batch·C·d) per step; with
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
from fedfa.algorithms.method import AUTHORS_TRAINING, Method
from fedfa.learning.part import Batch, ClientContext, Options, Part, Role, ServerStep, Task
from fedfa.learning.sums import WeightedSum
from fedfa.learning.tensors import PartTensors, Tensors


class PrototypesOptions(Options):
    """Options of the prototypes."""

    lam: float = Field(1.0, ge=0)
    """Weight λ of the distance to the global prototypes (eq. 7)."""
    loss: Literal["sample", "class"] = "sample"
    """``sample``: (h − p_y)², mean over samples and dimensions. ``class``: eq. 8, the L2 distance of the batch's class
    mean, summed over the classes in the batch."""
    average_model: bool = False
    """Average the model as FedAvg does and let its classifier predict; without it every client has its own model."""
    prototypes: Literal["last-epoch", "full-pass"] = "last-epoch"
    """Class means of the last local epoch's features as training met them, or of one pass with the trained model."""
    weights: Literal["count", "uniform"] = "count"
    """Weights of the server's mean over the clients that hold a class: their samples of it, or one for all."""


class Prototypes(Part[PrototypesOptions]):
    """One prototype per class: exchanged, averaged, approached, and used to predict."""

    name = "fedproto"
    options_type = PrototypesOptions

    def stacks(self) -> bool:
        """Yes."""
        return True

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """No class has a prototype yet."""
        return no_prototypes(task)

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Published: everything that is trained or gathered stays on its client."""
        if self.options.average_model:
            return {}
        frozen = {name for name, parameter in task.model.module.named_parameters() if not parameter.requires_grad}
        return {name: Role.LOCAL for name in task.model.state() if name not in frozen}

    def begin(self, ctx: ClientContext) -> None:
        """Nothing gathered yet."""
        received = ctx.received[self.name]["prototypes"]
        ctx.scratch[self.name] = {
            "epoch": -1,
            "sums": (torch.zeros_like(received), torch.zeros_like(received[..., :1])),
        }

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Cross-entropy + λ · distance to the global prototypes (eq. 7)."""
        if self.options.lam == 0:
            return loss
        prototypes, known = ctx.received[self.name]["prototypes"], ctx.received[self.name]["known"]
        if self.options.loss == "sample":
            distance = (known[batch.y] * (batch.features - prototypes[batch.y])).square().mean(-1).mean(-1)
        else:
            sums, counts = class_sums(batch.features, membership(batch.y, ctx.num_classes, batch.features))
            apart = torch.linalg.vector_norm(sums / counts.clamp(min=1) - prototypes, dim=-1, keepdim=True)
            distance = (apart * known * (counts > 0)).sum((-2, -1))
        return loss + self.options.lam * distance

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Gather the class features of the epoch; only the last one's are sent."""
        if self.options.prototypes != "last-epoch":
            return
        mine = ctx.scratch[self.name]
        found = class_sums(batch.features.detach(), membership(batch.y, ctx.num_classes, batch.features))
        if mine["epoch"] != ctx.epoch:
            mine["epoch"], mine["sums"] = ctx.epoch, found
        else:
            mine["sums"] = (mine["sums"][0] + found[0], mine["sums"][1] + found[1])

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The client's prototypes (eq. 3)."""
        full_pass = self.options.prototypes == "full-pass"
        sums, counts = feature_pass(ctx) if full_pass else ctx.scratch[self.name]["sums"]
        return {"prototypes": prototype_sum(sums / counts.clamp(min=1), counts, self.options.weights)}

    def step(self, server: ServerStep) -> None:
        """The global prototypes: the mean over the clients that hold the class (eq. 6)."""
        renew_prototypes(server, self.name)

    def predict(self, received: PartTensors, features: Tensor, logits: Tensor) -> Tensor:
        """The nearest global prototype in L2 (eq. 4); the classifier if the model is averaged or there is none yet."""
        if self.options.average_model:
            return logits
        prototypes, known = received[self.name]["prototypes"], received[self.name]["known"]
        distance = torch.cdist(features, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = (-distance).masked_fill(known.mT == 0, -torch.inf)
        return torch.where(known.any(), nearest, logits)


def no_prototypes(task: Task) -> Tensors:
    """The server's state before the first round: ``prototypes`` ``[C, d]``, and which are ``known`` ``[C, 1]``."""
    weight = task.model.head.weight.detach()
    return {
        "prototypes": weight.new_zeros(task.num_classes, task.feature_dim),
        "known": weight.new_zeros(task.num_classes, 1),
    }


def feature_pass(ctx: ClientContext) -> tuple[Tensor, Tensor]:
    """Class sums and counts over all the client's samples with the network as it is, by one pass over them."""
    features = ctx.features()
    return class_sums(features, membership(ctx.labels(), ctx.num_classes, features))


def prototype_sum(prototypes: Tensor, counts: Tensor, weights: Literal["count", "uniform"]) -> WeightedSum:
    """A client's share of the server's mean over the clients that hold a class."""
    weight = counts if weights == "count" else (counts > 0).to(counts.dtype)
    return WeightedSum.of({"prototypes": prototypes}, weight)


def renew_prototypes(server: ServerStep, part: str) -> None:
    """The mean of the prototypes that were sent; a class that nobody met keeps the one it has."""
    group, mine = f"{part}/prototypes", server.state[part]
    met = server.total[group].weight > 0
    mean = server.total.mean(group)["prototypes"].to(mine["prototypes"].dtype)
    mine["prototypes"] = torch.where(met, mean, mine["prototypes"])
    mine["known"] = torch.where(met, torch.ones_like(mine["known"]), mine["known"])


FEDPROTO = Method(
    name="fedproto",
    summary="Clients keep their models and exchange class prototypes (Tan et al. 2022).",
    parts=(Prototypes,),
    variants={"paper": {}, "authors": {**AUTHORS_TRAINING}},
)
