"""Prototype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedfa.algorithms.class_features import ClassFeatures
from fedfa.algorithms.classifier import classifier_names, remember_classifier, replace_head
from fedfa.algorithms.fedetf import FrameHead
from fedfa.algorithms.fedlc import label_shift
from fedfa.algorithms.initial_anchors import initial_anchors
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, Role, ServerStep, Task
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel
from fedfa.stacking.products import rows


class TiedAnchors(Component):
    """Anchors that are the classifier."""

    name = "tied"
    traits = Traits(slot="logit calibration")

    mu: float = Field(0.0, ge=0)
    gamma: float = Field(1.0, ge=0)
    floor: float = Field(1.0, gt=0)
    beta: float = Field(10.0, gt=0)
    keep: float = Field(1.0, ge=0, le=1)
    form: Literal["free", "simplex"] = "free"

    def adapt(self, model: SplitModel, rng: np.random.Generator) -> SplitModel:
        classes, width = model.num_classes, model.feature_dim
        dim = max(width, classes)
        if classes < 2:
            raise AlgorithmError("two classes")
        head = FrameHead(model.head, initial_anchors("etf", classes, dim, rng), self.beta, bias=True, rng=rng)
        return replace_head(model, head, "frame")

    def roles(self, task: Task) -> Mapping[str, Role]:
        return {f"{task.model.head_name}.weight": Role.AVERAGED}

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        return remember_classifier(task)

    def begin(self, ctx: ClientContext) -> None:
        counts = ctx.label_counts.to(torch.float32)
        mine = ctx.scratch[self.name] = {"shift": label_shift(counts, "log", self.gamma, "floor", self.floor)}
        if self.keep < 1:
            mine["features"] = ClassFeatures(torch.zeros_like(ctx.start[f"{ctx.model.head_name}.weight"]))

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        return logits + ctx.scratch[self.name]["shift"].unsqueeze(-2)

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """+ μ · mean ‖u − a_y‖²; both have length one."""
        if self.mu == 0:
            return loss
        length = batch.features.detach().norm(dim=-1).clamp(min=1e-8)
        cosine = batch.logits.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1) / length
        return loss + self.mu * 2 * (1 - cosine).mean(-1)

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        if self.keep < 1:
            ctx.scratch[self.name]["features"].add(functional.normalize(batch.features.detach(), dim=-1), batch)

    def after_epoch(self, ctx: ClientContext) -> None:
        if self.keep < 1:
            features = ctx.scratch[self.name]["features"]
            features.previous = features.averaged = features.end_epoch()

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        if self.keep == 1 or not ctx.steps:
            return {}
        counts = ctx.label_counts.unsqueeze(-1).float()
        return {"anchors": WeightedSum.of({"anchors": ctx.scratch[self.name]["features"].averaged}, counts)}

    def step(self, server: ServerStep) -> None:
        group = f"{self.name}/anchors"
        if group not in server.aggregate:
            return
        (name,) = classifier_names(server, self.name)
        old = server.model[name].double()
        seen = functional.normalize(server.aggregate.mean(group)["anchors"].double(), dim=-1)
        seen = torch.where(server.aggregate[group].weight > 0, seen, old)
        new = functional.normalize(self.keep * old + (1 - self.keep) * seen, dim=-1)
        if self.form == "simplex":
            classes = len(new)
            centred = new - new.mean(0)
            left, _, right = torch.linalg.svd(centred, full_matrices=False)
            left, right = left[:, : classes - 1], right[: classes - 1]
            new = (classes / (classes - 1)) ** 0.5 * left @ right
        server.update[name] = new - old
