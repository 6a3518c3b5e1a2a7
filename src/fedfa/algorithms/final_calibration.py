"""FedFA's final calibration: beyond the paper, off unless ``variant = "plus"`` (or you) switch it on.

The anchors that training gathers are features of the clients' networks, each of which has drifted towards its own
classes; their mean is not what the averaged network computes. So after the last round every client passes its data once
through the final network and returns the sums of its class features. The server makes the exact class means of all data
of them and calibrates the classifier on these (eq. 5).

Sends once, after the last round: the model down, C·d + C numbers of 8 bytes up.
What the server learns: each client's class features and samples per class; secure aggregation hides all but the sums.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field

from fedfa.algorithms.anchor_kernels import AnchorBatch
from fedfa.algorithms.anchor_layers import LAST
from fedfa.algorithms.class_features import class_sums, membership
from fedfa.algorithms.classifier import classifier_names, remember_classifier
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ClientContext, ServerStep, Task
from fedfa.learning.tensors import Tensors, first_non_finite


class FinalCalibration(Component):
    """Measure the anchors of the final network, and calibrate the classifier on them."""

    name = "final"
    traits = Traits(final_pass=True, follows=("anchors",), global_classifier=True)

    steps: int = Field(0, ge=0)
    """Gradient steps of the server after the last round; 0 switches the final pass off."""
    lr: float = Field(0.1, gt=0)
    """Their learning rate."""

    @property
    def enabled(self) -> bool:
        """Only with steps to make."""
        return self.steps > 0

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """Which tensors are the classifier."""
        return remember_classifier(task)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The sum of the features of each class under the final network, and their number."""
        features = ctx.features().cpu().double()
        sums, counts = class_sums(features, membership(ctx.labels().cpu(), ctx.num_classes, features))
        return {"classes": WeightedSum({"sum": sums}, counts)}

    def step(self, server: ServerStep) -> None:
        """The exact anchors; a class that nobody holds keeps the one it had. Then eq. 5 by gradient descent."""
        group = f"{self.name}/classes"
        held, old = server.aggregate[group].weight > 0, server.state["anchors"][LAST]
        anchors = torch.where(held, server.aggregate.mean(group)["sum"], old.double())
        server.state["anchors"][LAST] = anchors.to(old.dtype)
        names = classifier_names(server, self.name)
        before = [server.model[name].double() for name in names]
        # The classifier as earlier components of the final pass left it.
        after = [value + server.update.get(name, 0) for name, value in zip(names, before, strict=True)]
        weight, bias = after[0], after[1] if len(after) > 1 else None
        batch = AnchorBatch.of(anchors, bias is not None)
        for _ in range(self.steps):
            batch.descend(weight, bias, batch.gradient(weight, bias), self.lr)
        update = {name: new - value for name, new, value in zip(names, after, before, strict=True)}
        if first_non_finite(update) is not None:
            raise AlgorithmError(f"the final calibration diverged: lower algorithm.final.lr (now {self.lr:g})")
        server.update |= update
