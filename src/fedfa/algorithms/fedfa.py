"""FedFA: feature anchors that align features and classifiers.

T. Zhou, J. Zhang, D. H. K. Tsang, *FedFA: Federated Learning with Feature Anchors to Align Features and Classifiers for
Heterogeneous Data*, IEEE Transactions on Mobile Computing 2023, arXiv:2211.09299. (Not the FedFA of ICLR 2023, which
augments features.) Equation numbers are the paper's; this file follows its Algorithm 1.

:class:`Anchors` pulls features to the anchor of their class (eq. 3, 4), accumulates class features (eq. 6, 7) and
averages them into the next anchors. :class:`Calibration` trains the classifier on the anchors (eq. 5). The paper's text
and its reference code differ; each difference is one option, and named variants set them all (``reference_code.py``).

Sends per client and round, besides the model: C·d numbers down, C·d up (nothing up with ``update = false``).
Server state: the anchors. Client state: none. Extra compute per step: O(batch·C·d + C²·d), small beside the network.
What the server learns: each client's class features (of a single sample, that sample's features), which classes it
lacks, and with ``weights = "count"`` its samples per class. Secure aggregation hides all of it but the aggregate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedfa.algorithms.anchor_kernels import AnchorBatch, anchor_loss
from fedfa.algorithms.anchor_layers import LAST, aligned_features, anchor_widths
from fedfa.algorithms.class_features import ClassFeatures
from fedfa.algorithms.initial_anchors import Initial, initial_anchors
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, Role, ServerStep, Task
from fedfa.learning.optimisers import Adam
from fedfa.learning.tensors import Tensors


class Anchors(Component):
    """One feature anchor per class: alignment (eq. 3, 4), accumulation (eq. 6, 7), averaging."""

    name = "anchors"
    traits = Traits(broadcasts=True, class_states=("anchors",))

    mu: float = Field(0.1, ge=0)
    """Weight μ of the anchor loss (eq. 4)."""
    per: Literal["sample", "class"] = Field("class", alias="loss")
    """``sample``: mean over the batch of ‖h − a_y‖² (eq. 3). ``class``: mean per class, summed, divided by all C."""
    update: bool = True
    """Renew the anchors each round; without it rounds send nothing about features."""
    momentum: float = Field(0.5, ge=0, le=1)
    """λ of eq. 7."""
    class_mean: Literal["batch", "exact"] = "exact"
    """``batch``: eq. 6, batch means divided by the number of batches (classes missing from a batch shrink).
    ``exact``: the true mean of the epoch's features of a class."""
    average: Literal["two-epochs", "running"] = "running"
    """``two-epochs``: eq. 7, λ m^(k−1) + (1−λ) m^(k). ``running``: ā ← λ ā + (1−λ) m^(k)."""
    start: Literal["zero", "received"] = "received"
    """What the average over epochs starts from: zero (m^(0) = 0) or the anchor that was received."""
    absent: Literal["keep", "zero"] = "keep"
    """What a client returns for classes it does not hold: the anchor it received, or zero."""
    weights: Literal["size", "count"] = "size"
    """Weights of the server's average: n_i for every class, or the client's samples of that class. With ``size`` and
    ``absent = "keep"`` clients that lack a class hold its anchor back, which acts as a momentum of the anchors."""
    layers: tuple[str, ...] = ()
    """Modules whose outputs are aligned, the last being what enters the classifier; left out, only that one."""
    initial: Initial = Field("orthogonal", alias="init")
    """``orthogonal`` (rows of the identity), ``random``, ``etf``, ``fedavg`` (the first round only gathers anchors), or
    the path of a file that holds anchors, e.g. the ``server.safetensors`` of a finished run (the paper's "ideal")."""

    @property
    def outputs(self) -> Sequence[str]:
        """The aligned layers."""
        return self.layers

    def in_use(self, round: int) -> bool:
        """Whether anchors act in this round, counted from 0; not in a first round that only gathers them."""
        return self.initial != "fedavg" or round > 0

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """The initial anchors, ``[C, d]``."""
        if self.initial == "fedavg" and not self.update:
            raise AlgorithmError('algorithm.anchors.init = "fedavg" needs update = true: it gathers anchors in round 1')
        dtype = task.model.head.weight.dtype
        return {
            name: initial_anchors(self.initial, task.num_classes, width, rng, name).to(dtype)
            for name, width in anchor_widths(task.model, self.layers).items()
        }

    def begin(self, ctx: ClientContext) -> None:
        """Class features start from m^(0) = 0 or from the received anchors."""
        ctx.scratch[self.name] = {
            name: ClassFeatures(a if self.start == "received" else torch.zeros_like(a), self.class_mean)
            for name, a in ctx.broadcast[self.name].items()
        }

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """Supervised loss + μ · anchor loss (eq. 4)."""
        if not self.in_use(ctx.round) or self.mu == 0:
            return loss
        counts = batch.class_counts() if self.per == "class" else None
        for name, features in aligned_features(batch, self.layers).items():
            anchors = ctx.broadcast[self.name][name]
            loss = loss + self.mu * anchor_loss(features, anchors, batch.y, counts)
        return loss

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Accumulate the class features of the forward pass (eq. 6)."""
        for name, features in aligned_features(batch, self.layers).items() if self.update else ():
            ctx.scratch[self.name][name].add(features, batch)

    def after_epoch(self, ctx: ClientContext) -> None:
        """Average the class features over epochs (eq. 7)."""
        for h in ctx.scratch[self.name].values() if self.update else ():
            mean = h.end_epoch()
            before = h.previous if self.average == "two-epochs" else h.averaged
            h.averaged = self.momentum * before + (1 - self.momentum) * mean if self.in_use(ctx.round) else mean
            h.previous = mean

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The client's class features ā and their weight; a client that made no step has none."""
        if not self.update or ctx.batches_per_epoch == 0:
            return {}
        counts, averages = ctx.label_counts.unsqueeze(-1), {}
        for name, features in ctx.scratch[self.name].items():
            received = ctx.broadcast[self.name][name]
            absent = received if self.absent == "keep" else torch.zeros_like(received)
            averages[name] = torch.where(counts > 0, features.averaged, absent)
        by_size = self.weights == "size" and self.in_use(ctx.round)
        weight: float | Tensor = float(ctx.size) if by_size else counts.to(averages[LAST].dtype)
        return {"anchors": WeightedSum.of(averages, weight)}

    def step(self, server: ServerStep) -> None:
        """The next anchors: the weighted mean over the cohort; a class without any weight keeps its anchor."""
        group = f"{self.name}/anchors"
        if group not in server.aggregate:
            return
        held = server.aggregate[group].weight > 0
        for name, mean in server.aggregate.mean(group).items():
            old = server.state[self.name][name]
            server.state[self.name][name] = torch.where(held, mean.to(old.dtype), old)


class Calibration(Component):
    """Train the classifier on the anchors as one batch of C samples with labels 1…C (eq. 5)."""

    name = "calibration"
    traits = Traits(follows=("anchors",))

    when: Literal["step", "epoch", "before", "after", "never"] = "step"
    """After each mini-batch (the paper), at the end of each epoch, once before or after local training, or never."""
    optimiser: Literal["sgd", "adam"] = "adam"
    """``sgd``: a step with the local learning rate. ``adam``: a new Adam in each client's round."""
    lr: float | None = Field(None, gt=0)
    """Learning rate; left out, the local one for ``sgd`` and 0.001 for ``adam``."""
    steps: int = Field(1, ge=1)
    """Steps each time."""

    @property
    def enabled(self) -> bool:
        """Unless it is switched off."""
        return self.when != "never"

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """No state; the classifier must be trained."""
        fixed = (Role.FROZEN, Role.AVERAGED)
        if frozen := [name for name in task.model.head_tensors if task.roles.get(name) in fixed]:
            raise AlgorithmError(
                f"FedFA calibrates the classifier, but {', '.join(frozen)} of this network is not trained; let it be "
                'trained, or set algorithm.calibration.when = "never"'
            )
        return {}

    def begin(self, ctx: ClientContext) -> None:
        """Prepare the anchors as a batch, and a new Adam."""
        anchors, biased = ctx.broadcast["anchors"][LAST], ctx.model.head.bias is not None
        ctx.scratch[self.name] = {"adam": Adam(self.lr or 0.001), "batch": AnchorBatch.of(anchors, biased)}
        if self.when == "before":
            self._calibrate(ctx)

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        """Calibrate after each mini-batch."""
        if self.when == "step":
            self._calibrate(ctx)

    def after_epoch(self, ctx: ClientContext) -> None:
        """Calibrate after each epoch, or after the last one."""
        if self.when == "epoch" or (self.when == "after" and ctx.last_epoch):
            self._calibrate(ctx)

    def _calibrate(self, ctx: ClientContext) -> None:
        """Descend on the cross-entropy of the anchors, −(1/C) Σ_c log softmax(W a_c + b)_c (eq. 5)."""
        if not ctx.component(Anchors).in_use(ctx.round):
            return
        batch, adam, head = ctx.scratch[self.name]["batch"], ctx.scratch[self.name]["adam"], ctx.model.head
        W, b = head.weight.data, None if head.bias is None else head.bias.data
        for _ in range(self.steps):
            direction, rate = batch.gradient(W, b), self.lr or ctx.local.lr
            if self.optimiser == "adam":
                direction, rate = adam.step(direction)
            batch.descend(W, b, direction, rate)  # (W, b) ← (W, b) − rate · direction
