"""FedNH: class prototypes on a sphere are the classifier; the server moves them, clients do not.

Y. Dai, Z. Chen, J. Li, S. Heinecke, L. Sun, R. Xu, *Tackling Data Heterogeneity in Federated Learning with Class
Prototypes*, AAAI 2023, arXiv:2212.02758.

The classifier is one unit vector w_c per class without bias, the logits are s·w_c·h/‖h‖ with a learnable scale s. The
vectors start as far apart as they can be: with at least as many features as classes that is the simplex of equal
angles, cosine −1/(C−1), which the paper reaches by optimisation. Clients train the rest of the network with the w_c
fixed. After training a client sends μ_c, the direction of the mean of its unit features of class c, and the server
makes

    w_c ← normalise( ρ w_c + (1 − ρ) normalise( Σ_k n_kc μ_kc / Σ_k n_kc ) ),

so that related classes may come closer (ρ = 0.9). A class nobody held keeps its vector. s starts at 10 here, which the
same network has in FedETF; in the published code it starts at 1.

Sends per client and round: the w_c down with the model, C·d prototypes and C counts up. Server state: the model, of
which w is a part. Client state: nothing. Extra compute: a forward pass over the client's data per round. What the
server learns: besides FedAvg's update each client's class means of features and its label counts (unless it only ever
sees secure sums).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfa.algorithms.classifier import classifier_names, remember_classifier, replace_head
from fedfa.algorithms.initial_anchors import initial_anchors
from fedfa.algorithms.prototypes import feature_pass, prototype_sum
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ClientContext, Role, ServerStep, Task
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel


class FedNH(Component):
    """Puts the prototypes into the network as its classifier, and renews them on the server."""

    name = "fednh"
    traits = Traits(
        excludes={
            "fedetf": "both replace the classifier; leave one of them out",
            "ccvr": "the classifier is made of prototypes here, and ccvr would train it; leave one of them out",
        },
        shared_model=True,
    )

    rho: float = Field(0.9, ge=0, le=1)
    """How much of a prototype is kept in a round, ρ; 1 leaves them as they began."""
    scale: float = Field(10.0, gt=0)
    """The learnable scale s before training."""

    def adapt(self, model: SplitModel, rng: np.random.Generator) -> SplitModel:
        """The network with unit features and fixed prototypes in place of its classifier."""
        classes, dim = model.num_classes, model.feature_dim
        if not 2 <= classes <= dim:
            raise AlgorithmError(
                f"fednh needs two classes or more and at least as many features: there are {classes} classes and {dim} "
                "features; choose a wider network (model.options)"
            )
        head = PrototypeHead(model.head, initial_anchors("etf", classes, dim, rng), self.scale)
        return replace_head(model, head, "prototypes")

    def roles(self, task: Task) -> Mapping[str, Role]:
        """The prototypes travel with the model; clients do not train them."""
        return {f"{task.model.head_name}.weight": Role.AVERAGED}

    @property
    def refuses(self) -> Mapping[str, str]:
        """Differential privacy: prototypes have length one, so noise alone would become one."""
        return {"privacy": "noise on a class that few clients hold would become a prototype of full length"}

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """Which tensor the prototypes are."""
        return remember_classifier(task)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """μ_c with weight n_c; what enters the prototypes is s times the unit features."""
        sums, counts = feature_pass(ctx)
        counts = counts if ctx.steps else torch.zeros_like(counts)  # nothing was trained, nothing was learned
        return {"prototypes": prototype_sum(functional.normalize(sums, dim=-1), counts, "count")}

    def step(self, server: ServerStep) -> None:
        """Renew the prototypes of the classes that somebody held."""
        group = f"{self.name}/prototypes"
        (name,) = classifier_names(server, self.name)
        old = server.model[name].double()
        seen = functional.normalize(server.aggregate.mean(group)["prototypes"], dim=-1)
        new = functional.normalize(self.rho * old + (1 - self.rho) * seen, dim=-1)
        server.update[name] = torch.where(server.aggregate[group].weight > 0, new - old, torch.zeros_like(old))


class PrototypeHead(nn.Module):
    """Features → length one → times s → one fixed vector per class."""

    def __init__(self, old: nn.Linear, prototypes: Tensor, scale: float) -> None:
        super().__init__()
        classes, dim = prototypes.shape
        self.in_features, self.out_features = dim, classes
        self.prototypes = nn.Linear(dim, classes, bias=False, device="meta")
        del self.prototypes.weight
        # A buffer: it travels like every statistic of the network, and no optimiser moves it.
        self.prototypes.register_buffer("weight", prototypes.to(old.weight))
        self.scale = nn.Parameter(old.weight.new_tensor(scale))

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.prototypes(self.scale * functional.normalize(features, dim=-1, eps=1e-8))
        return logits
