"""FedETF: a fixed classifier with the geometry that neural collapse ends in.

Z. Li, X. Shang, R. He, T. Lin, C. Wu, *No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier*, ICCV 2023, arXiv:2303.10058.

The linear classifier is replaced by a projection of the features to p dimensions, division by their length, a learnable
temperature β and a classifier that never changes: the rows of a simplex equiangular tight frame V (C unit vectors with
pairwise cosine −1/(C−1)). All clients so learn features for one and the same classifier. The logits are β·V·μ, μ being
the unit features; other components see the *features* β·μ. The local loss is the paper's balanced feature loss,

    − log( n_y^γ exp(β v_y·μ) / Σ_c n_c^γ exp(β v_c·μ) ),

n_c being the client's samples of class c: the logits are shifted by γ·log n_c. Classes the client does not hold count
as one sample, as in the published code; by the formula they would leave the softmax (``absent = "mask"``), and a client
of two classes would learn to tell these two apart and nothing else. Evaluation uses the plain logits. γ = 1; p = d and
β = 10 at first are what the published code has for its CIFAR-10 CNN (p = C and β = 1 for its other networks).

The paper's second stage, in which each client fine-tunes projection and classifier for itself, is not part of this
method: it makes personal models, and what is reported here is the global one.

Sends per client and round: the changed network (p·d numbers of the projection and β instead of the classifier's C·d)
but not V, which follows from the seed. Server state: the model. Client state: nothing. Extra compute per step: the
projection, O(batch·p·d). What the server learns: what it learns with FedAvg; label counts stay on the client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedfa.algorithms.classifier import replace_head
from fedfa.algorithms.fedlc import label_shift
from fedfa.algorithms.initial_anchors import initial_anchors
from fedfa.errors import AlgorithmError
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, Role, Task
from fedfa.models.split import SplitModel


class FedETF(Component):
    """Puts the fixed classifier into the network and balances the loss."""

    name = "fedetf"
    traits = Traits(
        slot="logit calibration",
        excludes={"ccvr": "the classifier is a fixed frame here, and ccvr would train it; leave one of them out"},
    )

    gamma: float = Field(1.0, ge=0)
    """γ of the balanced loss: logits are shifted by γ·log n_c; 0 is plain cross-entropy over all classes."""
    absent: Literal["floor", "mask"] = "floor"
    """Classes the client does not hold: counted as one sample, so that they stay in the softmax (the published code),
    or left out of it, as the formula has it for n_c = 0."""
    dim: int | None = Field(None, ge=2)
    """Width p of the projected features, at least C; left out, that of the network's features (C if they are fewer)."""
    bias: bool = True
    """Whether the projection has a bias."""
    beta: float = Field(10.0, gt=0)
    """The temperature β before training."""

    def adapt(self, model: SplitModel, rng: np.random.Generator) -> SplitModel:
        """The network with projection, temperature and fixed frame in place of its classifier."""
        classes, width = model.num_classes, model.feature_dim
        dim = self.dim or max(width, classes)
        if classes < 2 or dim < classes:
            raise AlgorithmError(
                f"{self.name} needs two classes or more and as many projected features: there are {classes} "
                f"classes, and algorithm.{self.name}.dim is {dim}"
            )
        frame = initial_anchors("etf", classes, dim, rng)
        head = FrameHead(model.head, frame, self.beta, bias=self.bias, rng=rng)
        return replace_head(model, head, "frame")

    def roles(self, task: Task) -> Mapping[str, Role]:
        """The frame is set once and never sent."""
        return {f"{task.model.head_name}.weight": Role.FROZEN}

    def begin(self, ctx: ClientContext) -> None:
        """The shift of the round: label counts do not change while a client trains."""
        counts = ctx.label_counts.to(torch.promote_types(ctx.model.head.weight.dtype, torch.float32))
        ctx.scratch[self.name] = {"shift": label_shift(counts, "log", self.gamma, self.absent)}

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        """Logits + γ·log n_c; they only enter the local loss."""
        if self.gamma == 0:
            return logits
        shift: Tensor = ctx.scratch[self.name]["shift"]
        return logits + shift.unsqueeze(-2)


class FrameHead(nn.Module):
    """Features → projection → length one → times β → the frame."""

    client_axis = True
    """Its own parameters may have a leading client axis (:mod:`fedfa.stacking.stacked_model`)."""

    def __init__(self, old: nn.Linear, frame: Tensor, beta: float, *, bias: bool, rng: np.random.Generator) -> None:
        super().__init__()
        classes, dim = frame.shape
        weight = old.weight
        self.in_features, self.out_features = old.in_features, classes
        # Made without values, because torch would draw them from its global generator.
        self.projection = nn.Linear(old.in_features, dim, bias=bias, device="meta", dtype=weight.dtype)
        self.frame = nn.Linear(dim, classes, bias=False, device="meta", dtype=weight.dtype)
        self.to_empty(device=weight.device)
        self.beta = nn.Parameter(weight.new_tensor(beta))
        bound = 1 / math.sqrt(old.in_features)  # torch's own range for a linear layer
        with torch.no_grad():
            for parameter in self.projection.parameters():
                parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, tuple(parameter.shape))))
            self.frame.weight.copy_(frame)
        self.frame.weight.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        unit = functional.normalize(self.projection(features), dim=-1, eps=1e-8)
        logits: Tensor = self.frame(self.beta[..., None, None] * unit)
        return logits
