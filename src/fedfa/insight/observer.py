"""Looks at the rounds that are due: asks the clients, and makes a record of what they answer.

Training does not notice. The observer adds a message to the plan that only its own part reads, and takes the answers
out of the results before the server sees them; what follows is computed from copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedfa.data import Federation
from fedfa.errors import RunError
from fedfa.insight import measures
from fedfa.insight.look import CLIENTS, COUNTS, FEATURES, HEAD, INPUTS, UPDATE, Look, features_of, head_of
from fedfa.insight.probe import Probe
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.server import ServerState
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel

LAST_ROUND = -1
"""Stands for the last round, whichever that is."""


@dataclass(frozen=True)
class Schedule:
    """Which rounds are looked at; rounds are counted from 1.

    Attributes:
        rounds: The last one.
        every: Rounds between measurements, 0 for none; the last round is measured too.
        features: Rounds whose features are stored; :data:`LAST_ROUND` is allowed.
    """

    rounds: int
    every: int
    features: Sequence[int] = ()

    def stores(self, round: int) -> bool:
        """Whether the probe's features of this round are stored."""
        return round in self.features or (round == self.rounds and LAST_ROUND in self.features)

    def due(self, round: int) -> bool:
        """Whether this round is looked at."""
        return self.stores(round) or (self.every > 0 and (round % self.every == 0 or round == self.rounds))


@dataclass(frozen=True)
class Observation:
    """What was seen in a round."""

    record: dict[str, Any]
    """For ``insight.jsonl``."""
    features: Tensors | None
    """For the file of probe features, where this round's are wanted."""


class Observer:
    """Looks at one run.

    Args:
        schedule: When.
        probe: On which samples.
        clients: How many of a round's clients are compared, pair by pair.
        federation: Who holds which domains.
        model: A network for the global model; its weights are overwritten.
        shared: Whether there is a global model; not where clients keep tensors of their own.

    Raises:
        RunError: The probe is empty.
    """

    def __init__(
        self,
        schedule: Schedule,
        probe: Probe,
        clients: int,
        federation: Federation,
        model: SplitModel,
        shared: bool = True,
    ) -> None:
        if not len(probe.labels):
            raise RunError(
                "looking inside takes test samples, but there are none here; add some, or set insight.every = 0 and "
                "insight.features = []"
            )
        self.schedule, self.probe, self.limit = schedule, probe, clients
        self._federation, self._model, self._shared = federation, model, shared
        self._answers: dict[int, dict[str, Tensors]] = {}
        self._asked = False

    def ask(self, plan: RoundPlan, clients: Sequence[int]) -> RoundPlan:
        """The plan with a request to the clients, if this round is due."""
        self._answers = {}
        self._asked = not plan.survey and self.schedule.due(plan.round + 1)
        if not self._asked:
            return plan
        request = {CLIENTS: torch.tensor(list(clients)[: self.limit]), INPUTS: self.probe.inputs}
        return replace(plan, received={**plan.received, Look.name: request})

    def take(self, result: ClientResult) -> ClientResult:
        """Take the answer out of what a client returned."""
        mine = {group: entry for group, entry in result.sums.items() if group.startswith(f"{Look.name}/")}
        if mine:
            self._answers[result.client] = {group.partition("/")[2]: entry.tensors for group, entry in mine.items()}
        return replace(result, sums={group: entry for group, entry in result.sums.items() if group not in mine})

    def observe(self, before: ServerState, after: ServerState) -> Observation | None:
        """What the answers say, once the server has finished the round; None if it was not due."""
        if not self._asked:
            return None
        answers, self._answers = self._answers, {}
        probe, model = self.probe, self._model
        model.load(after.model)
        global_features = features_of(model, probe.inputs.to(model.head.weight.device)).cpu() if self._shared else None
        each = [answer[FEATURES][FEATURES] for answer in answers.values()]
        features = torch.stack(each) if each else torch.zeros(0, len(probe.labels), model.feature_dim)
        holds, own = self._holdings(answers)
        anchors = self._anchors(before, after)
        classes = model.num_classes
        record = {
            "round": after.round,
            "clients": list(answers),
            "holds": [torch.nonzero(row).flatten().tolist() for row in holds],
            "samples": len(probe.labels),
            "feature_distance": _feature_distance(features, probe.labels, classes, holds),
            "classifier_cosine": _classifier_cosine([self._head_change(answer) for answer in answers.values()], model),
            "pair_similarity": _pair_similarity(features, probe.labels, own),
            "cka": _matrix_and_mean(measures.linear_cka(features)),
            **self._classifiers(features, global_features, [answer[HEAD] for answer in answers.values()]),
            "drift": self._drift([answer[UPDATE] for answer in answers.values()]),
            "anchors": {name: _anchor_geometry(*tensors) for name, tensors in anchors.items()},
        }
        stored = None
        if self.schedule.stores(after.round):
            stored = {
                "features": features,
                "labels": probe.labels,
                "positions": probe.positions,
                "clients": torch.tensor(list(answers), dtype=torch.int64),
                "own": own.to(torch.uint8),
                **({} if global_features is None else {"global": global_features}),
                **({} if probe.domains is None else {"domains": probe.domains}),
                **({"anchors": next(iter(anchors.values()))[1]} if anchors else {}),
            }
        return Observation(plain(record), stored)

    # -- inside -----------------------------------------------------------------------------------------------
    def _holdings(self, answers: dict[int, dict[str, Tensors]]) -> tuple[Tensor, Tensor]:
        """Which classes clients hold, ``[K, C]``, and on which probe samples they are at home, ``[K, n]``."""
        probe, train = self.probe, self._federation.dataset.train
        holds = torch.zeros(len(answers), self._model.num_classes, dtype=torch.bool)
        own = torch.zeros(len(answers), len(probe.labels), dtype=torch.bool)
        for row, (client, answer) in enumerate(answers.items()):
            holds[row] = answer[COUNTS][COUNTS] > 0
            own[row] = holds[row][probe.labels]
            if probe.domains is not None and train.domains is not None:
                own[row] &= torch.isin(probe.domains, train.domains[self._federation.client(client).positions])
        return holds, own

    def _head_change(self, answer: dict[str, Tensors]) -> Tensor:
        """The classifier's update, a row per class: weight and, if there is one, bias."""
        change = [answer[UPDATE][name] for name in self._model.head_tensors]
        return torch.cat([tensor.reshape(len(tensor), -1) for tensor in change], dim=1)

    def _classifiers(self, features: Tensor, global_features: Tensor | None, heads: list[Tensors]) -> dict[str, Any]:
        """Gradients with respect to the classifiers, and how often they are right."""

        def gradient_and_accuracy(features: Tensor, head: Tensors) -> tuple[Tensor, Tensor]:
            labels, weight, bias = self.probe.labels, head["weight"], head.get("bias")
            right = measures.scores(features, weight, bias).argmax(-1) == labels
            return measures.classifier_gradient(features, labels, weight, bias), right.double().mean()

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
        rest = [[value for name, value in update.items() if name not in head] for update in updates]
        return {
            "norm": whole.norms,
            "extractor": measures.drift(measures.gram(rest)).norms,
            "classifier": classifier.norms,
            "to_mean": whole.to_mean,
            "cosine": measures.pairs_mean(whole.cosines),
            "matrix": whole.cosines,
            "agreement": whole.agreement,
        }

    def _anchors(self, before: ServerState, after: ServerState) -> dict[str, tuple[Tensor, Tensor]]:
        """What parts keep on the server with one vector of the features' width per class, before and after the round.

        Whatever a method calls them: anchors, prototypes. Tensors named after a weight (momenta, control variates) are
        something else.
        """
        shape = (self._model.num_classes, self._model.feature_dim)
        found = {}
        for part, tensors in after.parts.items():
            for name, value in tensors.items():
                of_weight = any(name == weight or name.endswith(f".{weight}") for weight in after.model)
                if tuple(value.shape) == shape and not of_weight:
                    found[f"{part}/{name}"] = (before.parts.get(part, {}).get(name, value), value)
        return found


def _matrix_and_mean(matrix: Tensor) -> dict[str, Tensor]:
    return {"mean": measures.pairs_mean(matrix), "matrix": matrix}


def _feature_distance(features: Tensor, labels: Tensor, classes: int, holds: Tensor) -> dict[str, Any]:
    distances = measures.feature_distances(features)
    matrix = distances.mean(-1)
    by_class = measures.distance_by_class(distances, labels, classes, holds)
    everywhere = measures.pairs_mean(matrix)
    scale = features.double().square().sum(-1).mean().sqrt()
    return {
        "by_class": by_class,
        "mean": by_class.nanmean(),
        "all_by_class": measures.distance_by_class(distances, labels, classes),
        "all": everywhere,
        "authors": matrix.mean(),
        "relative": everywhere / scale,
        "mean_relative": by_class.nanmean() / scale,
        "matrix": matrix,
    }


def _classifier_cosine(changes: list[Tensor], model: SplitModel) -> dict[str, Any]:
    updates = torch.stack(changes) if changes else torch.zeros(0, model.num_classes, 1)
    rows = measures.row_cosines(updates)
    matrix = rows.nanmean(-1)
    return {
        "by_class": measures.pairs_mean(rows),
        "mean": measures.pairs_mean(matrix),
        "authors": rows.nan_to_num(0.0).mean(),  # torch's cosine of a zero vector, which they use, is zero
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


def _anchor_geometry(before: Tensor, after: Tensor) -> dict[str, Any]:
    found = measures.geometry(before, after)
    return {
        "norms": found.norms,
        "movement": found.movement,
        "mean_cosine": measures.pairs_mean(found.cosines),
        "cosines": found.cosines,
    }


def plain(value: Any) -> Any:
    """For JSON: tensors as lists, seven digits, None for what is undefined."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if abs(value) < float("inf") else None
    return value
