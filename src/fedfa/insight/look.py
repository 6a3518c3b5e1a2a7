"""What a client is asked for when a round is looked at: its trained model's features of the probe, and its change.

It is a part like any other, so the answers travel as all contributions do, with every engine; the server takes them out
before it adds up anything. A real federation would not do this: single clients' models become visible. That is why
looking is for research on data of one's own, and off unless asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedfa.learning.part import ClientContext, NoOptions, Part
from fedfa.learning.sums import WeightedSum
from fedfa.learning.tensors import first_non_finite
from fedfa.models.split import SplitModel

CLIENTS, INPUTS = "clients", "inputs"
"""What is sent: who shall answer, and the probe's inputs."""
FEATURES, HEAD, UPDATE, COUNTS = "features", "head", "update", "counts"
"""Groups of the answer: ``[n, d]``; the trained classifier; trained minus received weights; samples per class."""


class Look(Part[NoOptions]):
    """Answers when asked; changes nothing."""

    name = "insight"

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """The answer; nothing from clients that were not asked, or whose features are no numbers any more."""
        asked = ctx.received.get(self.name)
        if not asked or ctx.client not in asked[CLIENTS].tolist():
            return {}
        features = {FEATURES: features_of(ctx.model, asked[INPUTS])}
        if first_non_finite(features) is not None:  # weights may be finite still: it is not for us to end the run
            return {}
        state = ctx.model.state()
        trained = {name: state[name] - ctx.start[name] for name, _ in ctx.model.module.named_parameters()}
        return {
            FEATURES: WeightedSum.of(features, 1),
            HEAD: WeightedSum.of(head_of(ctx.model), 1),
            UPDATE: WeightedSum.of(trained, 1),
            COUNTS: WeightedSum.of({COUNTS: ctx.label_counts}, 1),
        }


def head_of(model: SplitModel) -> dict[str, Tensor]:
    """The classifier's ``weight`` and, if it has one, ``bias``."""
    state = model.state()
    return {name.rpartition(".")[2]: state[name] for name in model.head_tensors}


def features_of(model: SplitModel, inputs: Tensor, batch_size: int = 500) -> Tensor:
    """Features of prepared inputs, ``[n, d]``: one pass in evaluation mode, without a graph."""
    was_training = model.module.training
    model.module.eval()
    with torch.no_grad():
        features = torch.cat([model(batch)[0] for batch in torch.split(inputs, batch_size)])
    model.module.train(was_training)
    model.outputs = {}
    return features
