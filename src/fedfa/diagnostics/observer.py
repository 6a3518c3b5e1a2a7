"""The observer: requests measurements from clients in scheduled rounds and builds a record of their responses.

It does not affect training. The request is a broadcast that only :class:`ClientProbe` reads, and responses are removed
from the results before aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedfa.data import Federation
from fedfa.diagnostics import measures
from fedfa.diagnostics.probe import (
    CLIENTS,
    COUNTS,
    FEATURES,
    HEAD,
    INPUTS,
    UPDATE,
    ClientProbe,
    Probe,
    features_of,
    head_of,
)
from fedfa.errors import RunError
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.round import ServerState
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel

LAST_ROUND = -1
"""Denotes the last round."""


@dataclass(frozen=True)
class Schedule:
    """The rounds to measure, counted from 1."""

    rounds: int
    """The last round."""
    every: int
    """Rounds between measurements, 0 for none; the last round is always measured too."""
    features: Sequence[int] = ()
    """Rounds whose features are stored; :data:`LAST_ROUND` is allowed."""

    def stores(self, round: int) -> bool:
        """Return whether to store the features of this round."""
        return round in self.features or (round == self.rounds and LAST_ROUND in self.features)

    def due(self, round: int) -> bool:
        """Return whether to measure this round."""
        return self.stores(round) or (self.every > 0 and (round % self.every == 0 or round == self.rounds))


@dataclass(frozen=True)
class Observation:
    """The measurements of one round."""

    record: dict[str, Any]
    """The line of ``diagnostics.jsonl``."""
    features: Tensors | None
    """The probe features, if the schedule stores those of this round."""


@dataclass
class Observer:
    """Measures the scheduled rounds of one run.

    Raises:
        RunError: The probe is empty.
    """

    schedule: Schedule
    probe: Probe
    max_clients: int
    """Maximum number of clients of a round that are compared pairwise."""
    _federation: Federation
    """The clients' data, for their domains."""
    _model: SplitModel
    """Receives the weights of the global model."""
    shared: bool = True
    """Whether there is a global model; False if clients have private tensors."""
    _responses: dict[int, dict[str, Tensors]] = field(default_factory=dict, init=False)
    _requested: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not len(self.probe.labels):
            raise RunError(
                "diagnostics require test samples, but the data set has none; add some, or set diagnostics.every = 0 "
                "and diagnostics.features = []"
            )

    def request(self, plan: RoundPlan, clients: Sequence[int]) -> RoundPlan:
        """Add the request to the plan if this round is due."""
        self._responses = {}
        self._requested = not plan.final_pass and self.schedule.due(plan.round + 1)
        if not self._requested:
            return plan
        request = {CLIENTS: torch.tensor(list(clients)[: self.max_clients]), INPUTS: self.probe.inputs}
        return replace(plan, broadcast={**plan.broadcast, ClientProbe.name: request})

    def extract(self, result: ClientResult) -> ClientResult:
        """Move the response out of a client's contribution."""
        contribution, response = {}, {}
        for name, entry in result.contribution.items():
            component, _, group = name.partition("/")
            if component == ClientProbe.name:
                response[group] = entry.tensors
            else:
                contribution[name] = entry
        if response:
            self._responses[result.client] = response
        return replace(result, contribution=contribution)

    def observe(self, before: ServerState, after: ServerState) -> Observation | None:
        """Measure a round that the server has finished; None if it was not due."""
        if not self._requested:
            return None
        responses, self._responses = self._responses, {}
        probe, model = self.probe, self._model
        model.load(after.model)
        global_features = features_of(model, probe.inputs.to(model.head.weight.device)).cpu() if self.shared else None
        each = [response[FEATURES][FEATURES] for response in responses.values()]
        features = torch.stack(each) if each else torch.zeros(0, len(probe.labels), model.feature_dim)
        has_class, own = self._own_data(responses)
        anchors = self._anchors(before, after)
        classes, cka = model.num_classes, measures.linear_cka(features)
        record = {
            "round": after.round,
            "clients": list(responses),
            "holds": [torch.nonzero(row).flatten().tolist() for row in has_class],
            "samples": len(probe.labels),
            "feature_distance": _feature_distance(features, probe.labels, classes, has_class),
            "classifier_cosine": _classifier_cosine(list(map(self._head_update, responses.values())), model),
            "pair_similarity": _pair_similarity(features, probe.labels, own),
            "cka": {"mean": measures.pairs_mean(cka), "matrix": cka},
            **self._classifiers(features, global_features, [response[HEAD] for response in responses.values()]),
            "drift": self._drift([response[UPDATE] for response in responses.values()]),
            "anchors": {name: measures.anchor_geometry(*tensors) for name, tensors in anchors.items()},
        }
        stored = None
        if self.schedule.stores(after.round):
            stored = {
                "features": features,
                "labels": probe.labels,
                "positions": probe.positions,
                "clients": torch.tensor(list(responses), dtype=torch.int64),
                "own": own.to(torch.uint8),
                **({} if global_features is None else {"global": global_features}),
                **({} if probe.domains is None else {"domains": probe.domains}),
                **({"anchors": next(iter(anchors.values()))[1]} if anchors else {}),
            }
        return Observation(plain(record), stored)

    def _own_data(self, responses: dict[int, dict[str, Tensors]]) -> tuple[Tensor, Tensor]:
        """Return each client's classes, ``[K, C]``, and the probe samples of its classes and domains, ``[K, n]``."""
        probe, train = self.probe, self._federation.dataset.train
        has_class = torch.zeros(len(responses), self._model.num_classes, dtype=torch.bool)
        own = torch.zeros(len(responses), len(probe.labels), dtype=torch.bool)
        for row, (client, response) in enumerate(responses.items()):
            has_class[row] = response[COUNTS][COUNTS] > 0
            own[row] = has_class[row][probe.labels]
            if probe.domains is not None and train.domains is not None:
                own[row] &= torch.isin(probe.domains, train.domains[self._federation.client(client).positions])
        return has_class, own

    def _head_update(self, response: dict[str, Tensors]) -> Tensor:
        """Return the classifier's update, one row per class: weight and bias (if any)."""
        update = [response[UPDATE][name] for name in self._model.head_tensors]
        return torch.cat([tensor.reshape(len(tensor), -1) for tensor in update], dim=1)

    def _classifiers(self, features: Tensor, global_features: Tensor | None, heads: list[Tensors]) -> dict[str, Any]:
        """Return the gradients with respect to the classifiers, and their accuracies."""

        def gradient_and_accuracy(features: Tensor, head: Tensors) -> tuple[Tensor, Tensor]:
            labels, weight, bias = self.probe.labels, head["weight"], head.get("bias")
            correct = measures.scores(features, weight, bias).argmax(-1) == labels
            return measures.classifier_gradient(features, labels, weight, bias), correct.double().mean()

        clients = [gradient_and_accuracy(own, head) for own, head in zip(features, heads, strict=True)]
        gradient, accuracy = None, None
        if global_features is not None:
            shared = {name: value.cpu() for name, value in head_of(self._model).items()}
            gradient, accuracy = gradient_and_accuracy(global_features, shared)
        return {
            "gradient": {
                "global": None if gradient is None else torch.linalg.matrix_norm(gradient),
                "global_by_class": None if gradient is None else torch.linalg.vector_norm(gradient, dim=1),
                "clients": [torch.linalg.matrix_norm(one) for one, _ in clients],
            },
            "accuracy": {"global": accuracy, "clients": [one for _, one in clients]},
        }

    def _drift(self, updates: list[Tensors]) -> dict[str, Any]:
        head = self._model.head_tensors
        whole = measures.drift(measures.gram([list(update.values()) for update in updates]))
        classifier = measures.drift(measures.gram([[update[name] for name in head] for update in updates]))
        extractor = [[value for name, value in update.items() if name not in head] for update in updates]
        return {
            "norm": whole.norms,
            "extractor": measures.drift(measures.gram(extractor)).norms,
            "classifier": classifier.norms,
            "to_mean": whole.to_mean,
            "cosine": measures.pairs_mean(whole.cosines),
            "matrix": whole.cosines,
            "agreement": whole.agreement,
        }

    def _anchors(self, before: ServerState, after: ServerState) -> dict[str, tuple[Tensor, Tensor]]:
        """Find anchors or prototypes, before and after the round: server tensors of shape ``[C, d]``.

        Tensors named after a weight (momenta, control variates) are excluded.
        """
        shape = (self._model.num_classes, self._model.feature_dim)
        found = {}
        for component, tensors in after.components.items():
            for name, value in tensors.items():
                of_weight = any(name == weight or name.endswith(f".{weight}") for weight in after.model)
                if tuple(value.shape) == shape and not of_weight:
                    found[f"{component}/{name}"] = (before.components.get(component, {}).get(name, value), value)
        return found


def _feature_distance(features: Tensor, labels: Tensor, classes: int, has_class: Tensor) -> dict[str, Any]:
    distances = measures.feature_distances(features)
    matrix = distances.mean(-1)
    by_class = measures.distance_by_class(distances, labels, classes, has_class)
    mean_over_all = measures.pairs_mean(matrix)
    scale = features.double().square().sum(-1).mean().sqrt()
    return {
        "by_class": by_class,
        "mean": by_class.nanmean(),
        "all_by_class": measures.distance_by_class(distances, labels, classes),
        "all": mean_over_all,
        "authors": matrix.mean(),
        "relative": mean_over_all / scale,
        "mean_relative": by_class.nanmean() / scale,
        "matrix": matrix,
    }


def _classifier_cosine(per_client: list[Tensor], model: SplitModel) -> dict[str, Any]:
    updates = torch.stack(per_client) if per_client else torch.zeros(0, model.num_classes, 1)
    rows = measures.row_cosines(updates)
    matrix = rows.nanmean(-1)
    return {
        "by_class": measures.pairs_mean(rows),
        "mean": measures.pairs_mean(matrix),
        "authors": rows.nan_to_num(0.0).mean(),  # the reference code uses torch's cosine, which is 0 for zero vectors
        "whole": measures.pairs_mean(measures.cosines(updates.flatten(1))),
        "matrix": matrix,
    }


def _pair_similarity(features: Tensor, labels: Tensor, own: Tensor) -> dict[str, Any]:
    positive, negative = measures.pair_similarities(features, labels, own)
    return {
        "edges": [2 * edge / measures.BINS - 1 for edge in range(measures.BINS + 1)],
        "positive": positive.counts,
        "negative": negative.counts,
        "positive_mean": positive.mean,
        "negative_mean": negative.mean,
        "positive_pairs": positive.pairs,
        "negative_pairs": negative.pairs,
    }


def plain(value: Any) -> Any:
    """Convert to JSON types: tensors to lists, floats to seven digits, undefined values to None."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if abs(value) < float("inf") else None
    return value
