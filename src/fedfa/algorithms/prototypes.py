"""Class prototypes on the server, for FedProto and FedProc: their state, a client's share, and their renewal."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedfa.algorithms.class_features import class_sums, membership
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.context import ClientContext, ServerStep, Task
from fedfa.learning.tensors import Tensors


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


def renew_prototypes(server: ServerStep, component: str) -> None:
    """The mean of the prototypes that were sent; a class without any keeps the one it has."""
    group, mine = f"{component}/prototypes", server.state[component]
    held = server.aggregate[group].weight > 0
    mean = server.aggregate.mean(group)["prototypes"].to(mine["prototypes"].dtype)
    mine["prototypes"] = torch.where(held, mean, mine["prototypes"])
    mine["known"] = torch.where(held, torch.ones_like(mine["known"]), mine["known"])
