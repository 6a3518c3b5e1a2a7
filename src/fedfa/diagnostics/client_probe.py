"""The component that makes clients return features of the probe, their classifier and their update.

Responses are contributions like any other, so they work with every engine; the observer removes them before
aggregation. They expose the models of individual clients, which a real federation must not do. Diagnostics are for
research on your own data, and off by default.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component
from fedfa.learning.context import ClientContext
from fedfa.learning.tensors import first_non_finite
from fedfa.models.split import SplitModel

CLIENTS, INPUTS = "clients", "inputs"
"""The request: clients that respond, and the inputs of the probe."""
FEATURES, HEAD, UPDATE, COUNTS = "features", "head", "update", "counts"
"""Groups of the response: ``[n, d]``; the trained classifier; trained minus broadcast weights; samples per class."""


class ClientProbe(Component):
    """Responds to the observer's request; does not affect training."""

    name = "diagnostics"

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """Return the response; nothing if the client is not in the request or its features are not finite."""
        request = ctx.broadcast.get(self.name)
        if not request or ctx.client not in request[CLIENTS].tolist():
            return {}
        features = {FEATURES: features_of(ctx.model, request[INPUTS])}
        if first_non_finite(features) is not None:  # the weights may still be finite, so do not fail the run
            return {}
        state = ctx.model.state()
        update = {name: state[name] - ctx.start[name] for name, _ in ctx.model.module.named_parameters()}
        return {
            FEATURES: WeightedSum.of(features, 1),
            HEAD: WeightedSum.of(head_of(ctx.model), 1),
            UPDATE: WeightedSum.of(update, 1),
            COUNTS: WeightedSum.of({COUNTS: ctx.label_counts}, 1),
        }


def head_of(model: SplitModel) -> dict[str, Tensor]:
    """Return the classifier's ``weight`` and ``bias`` (if any)."""
    state = model.state()
    return {name.rpartition(".")[2]: state[name] for name in model.head_tensors}


def features_of(model: SplitModel, inputs: Tensor, batch_size: int = 500) -> Tensor:
    """Compute the features of normalised inputs, ``[n, d]``, in evaluation mode without gradients."""
    was_training = model.module.training
    model.module.eval()
    with torch.no_grad():
        features = torch.cat([model(batch)[0] for batch in torch.split(inputs, batch_size)])
    model.module.train(was_training)
    model.outputs = {}
    return features
