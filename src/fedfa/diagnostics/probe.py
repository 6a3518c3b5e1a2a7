"""The probe: test samples on which all models of a round are measured, and the component that makes clients respond.

Responses are contributions like any other, so they work with every engine; the observer removes them before
aggregation. They expose the models of individual clients, which a real federation must not do. Diagnostics are for
research on your own data, and off by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfa.data import DataSet
from fedfa.errors import ConfigError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ClientContext
from fedfa.learning.random import stream
from fedfa.learning.tensors import first_non_finite
from fedfa.models.split import SplitModel


@dataclass(frozen=True, eq=False)
class Probe:
    """Normalised test samples."""

    inputs: Tensor
    """Normalised, ``[n, …]``."""
    labels: Tensor
    """``[n]``."""
    domains: Tensor | None
    """Domain of each sample, if the data set has several."""
    positions: Tensor
    """Ascending indices into the test set."""

    @classmethod
    def of(cls, dataset: DataSet, samples: int, seed: int) -> Probe:
        """Select the same samples for every run with this data set and seed.

        Args:
            dataset: The probe is drawn from its test set.
            samples: Size of the probe; the whole test set if that is smaller.
            seed: Seed of the data split, so that compared algorithms and training seeds share one probe.
        """
        test = dataset.test
        if test.inputs.dtype == torch.int8:
            raise ConfigError("diagnostics probe inputs of one tensor; these have several: set diagnostics.every = 0")
        several = test.domains is not None and len(dataset.domains) > 1
        domains = test.domains if several else None
        positions = torch.from_numpy(balanced_subset(test.labels.numpy(), domains, samples, seed))
        return cls(
            # Contiguous, as clients receive it from every engine: the memory order affects rounding.
            dataset.normalisation.batch(test.subset(positions).inputs).contiguous(),
            test.labels[positions],
            None if domains is None else domains[positions],
            positions,
        )


def balanced_subset(labels: np.ndarray, domains: Tensor | None, samples: int, seed: int) -> np.ndarray:
    """Select samples, balanced over domains and classes, and return their ascending positions.

    Example:
        >>> chosen = balanced_subset(np.array([0, 0, 0, 0, 1, 1]), None, 4, seed=1)
        >>> np.array([0, 0, 0, 0, 1, 1])[chosen].tolist()
        [0, 0, 1, 1]
    """
    return np.sort(balanced_order(labels, None if domains is None else domains.numpy(), seed)[:samples])


def balanced_order(labels: np.ndarray, domains: np.ndarray | None, seed: int) -> np.ndarray:
    """Order all positions round-robin: one sample of each class of each domain, then another of each, and so on.

    Every class of every domain is shuffled; exhausted ones are skipped.
    """
    domains = np.zeros_like(labels) if domains is None else domains
    rank, group = np.zeros((2, len(labels)), dtype=np.int64)
    for number, (domain, label) in enumerate(sorted(set(zip(domains.tolist(), labels.tolist(), strict=True)))):
        members = np.flatnonzero((domains == domain) & (labels == label))
        rank[stream(seed, "probe", domain, label).permutation(members)] = np.arange(len(members))
        group[members] = number
    return np.lexsort((group, rank))


CLIENTS, INPUTS = "clients", "inputs"
"""The request: clients that respond, and the inputs of the probe."""
FEATURES, HEAD, UPDATE, COUNTS = "features", "head", "update", "counts"
"""Groups of the response: ``[n, d]``; the trained classifier; trained minus broadcast weights; samples per class."""


class ClientProbe(Component):
    """Responds to the observer's request; does not affect training."""

    name = "diagnostics"
    traits = Traits(exact=("*",))

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
