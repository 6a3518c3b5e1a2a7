"""Evaluation of a model: accuracy, loss and further metrics on a set of samples, by class and by domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedfa.learning.metrics import Metric, Value, plain
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel
from fedfa.trees import NetworkInput, to_device

EvaluatedOn = Literal["test", "validation"]
"""What a model is evaluated on."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation in fractions between 0 and 1.

    ``accuracy`` and ``metrics`` are means over domains where there are several, the rest is over samples; see
    :func:`fedfa.learning.metrics.averages`.
    """

    accuracy: float
    loss: float
    class_accuracy: list[float | None]
    """None for a class that the test set does not have."""
    domain_accuracy: dict[str, float]
    metrics: dict[str, Value] = field(default_factory=dict)
    domain_metrics: dict[str, dict[str, Value]] = field(default_factory=dict)
    """The metrics in each domain, where there are several."""
    domain_class_accuracy: dict[str, list[float | None]] = field(default_factory=dict)
    """The accuracy on each class in each domain, where there are several."""


def evaluate(
    model: SplitModel,
    inputs: Tensor,
    labels: Tensor,
    prepare: Callable[[Tensor], NetworkInput],
    *,
    domains: Tensor | None = None,
    domain_names: tuple[str, ...] = (),
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
    batch_size: int = 500,
    device: torch.device | None = None,
) -> Evaluation:
    """Evaluate on a test set that is prepared batch by batch.

    Args:
        model: The network with its weights.
        inputs: Raw inputs, ``[N, …]``.
        labels: ``[N]``.
        prepare: Turns a slice of ``inputs`` into what the network takes.
        domains: Domain of each sample, if there are several.
        domain_names: Their names.
        score: From features and logits to the scores whose largest is the prediction; left out, the logits.
        batch_size: Samples at a time.
        device: Where the network is.
    """
    found = answers(model, inputs, labels, prepare, score=score, batch_size=batch_size, device=device)
    return judge(found, labels, model.num_classes, domains=domains, domain_names=domain_names)


def answers(
    model: SplitModel,
    inputs: Tensor,
    labels: Tensor,
    prepare: Callable[[Tensor], NetworkInput],
    *,
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
    batch_size: int = 500,
    device: torch.device | None = None,
    with_scores: bool = False,
) -> Tensors:
    """What each sample gives, in order: ``hit``, ``loss`` and, where they are asked for, ``scores``.

    ``hit`` is whether the prediction is right, ``loss`` the cross-entropy. See :func:`evaluate`.
    """
    device = device or torch.device("cpu")
    hits, losses, all_scores = [], [], []
    was_training = model.module.training
    model.module.eval()
    with torch.inference_mode():
        for start in range(0, len(labels), batch_size):
            y = labels[start : start + batch_size].to(device)
            x = to_device(prepare(inputs[start : start + batch_size]), device)
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr():
                x = x.clone()  # not the test set itself: a network may write to its input
            features, logits = model(x)
            scores = logits if score is None else score(features, logits)
            hits.append((scores.argmax(-1) == y).cpu())
            losses.append(functional.cross_entropy(logits, y, reduction="none").cpu())
            if with_scores:
                all_scores.append(scores.float().cpu())
    model.module.train(was_training)
    model.outputs = {}
    found = {"hit": torch.cat(hits), "loss": torch.cat(losses)}
    return {**found, "scores": torch.cat(all_scores)} if with_scores else found


def judge(
    found: Mapping[str, Tensor],
    labels: Tensor,
    num_classes: int,
    *,
    domains: Tensor | None = None,
    domain_names: tuple[str, ...] = (),
    metrics: Sequence[Metric] = (),
) -> Evaluation:
    """The evaluation, from the per-sample results of :func:`answers`."""
    hit, loss = found["hit"], found["loss"]
    chosen = {}
    if domains is not None and len(domain_names) > 1:
        each = {name: domains == number for number, name in enumerate(domain_names)}
        chosen = {name: samples for name, samples in each.items() if samples.any()}
    by_domain = {name: float(hit[samples].double().mean()) for name, samples in chosen.items()}
    values, by_domain_values = _metric_values(found, labels, chosen, metrics)
    return Evaluation(
        sum(by_domain.values()) / len(by_domain) if by_domain else float(hit.double().mean()),
        float(loss.double().mean()),
        _by_class(hit, labels, num_classes),
        by_domain,
        values,
        by_domain_values,
        {name: _by_class(hit[samples], labels[samples], num_classes) for name, samples in chosen.items()},
    )


def _by_class(hit: Tensor, labels: Tensor, num_classes: int) -> list[float | None]:
    return [float(hit[chosen].double().mean()) if (chosen := labels == c).any() else None for c in range(num_classes)]


def _metric_values(
    found: Mapping[str, Tensor], labels: Tensor, chosen: Mapping[str, Tensor], metrics: Sequence[Metric]
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """The metrics of all samples, and those of each domain. Lists (a confusion matrix) are of all samples."""
    if not metrics:
        return {}, {}
    y, scores = labels.numpy(), found["scores"].numpy()
    # A function of the user's gets copies: it cannot change the test set.
    values = {one.name: one(y.copy(), scores.copy()) for one in metrics}
    by_domain = {
        name: {one.name: one(y[rows], scores[rows]) for one in metrics}
        for name, samples in chosen.items()
        if (rows := samples.numpy()) is not None
    }
    for name, value in values.items():
        if by_domain and not isinstance(value, list):
            values[name] = mean_value([own[name] for own in by_domain.values()])
    return values, by_domain


def mean_value(values: Sequence[Value]) -> Value:
    """The mean of those that are not None; of lists, entry by entry."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if all(isinstance(value, list) for value in known):
        return plain(np.mean([np.asarray(value, dtype=np.float64) for value in known], axis=0))
    return sum(value for value in known if isinstance(value, int | float)) / len(known)


def mean_evaluation(each: Sequence[Evaluation]) -> Evaluation:
    """The mean of several models' evaluations; by class and by domain over those that have it."""
    by_class: list[float | None] = []
    for values in zip(*(one.class_accuracy for one in each), strict=True):
        present = [value for value in values if value is not None]
        by_class.append(sum(present) / len(present) if present else None)
    domains = sorted({name for one in each for name in one.domain_accuracy})
    by_domain = {}
    metrics = {name: mean_value([one.metrics[name] for one in each]) for name in each[0].metrics}
    by_domain_metrics: dict[str, dict[str, Value]] = {}
    for domain in domains:
        present = [one.domain_accuracy[domain] for one in each if domain in one.domain_accuracy]
        by_domain[domain] = sum(present) / len(present)
        there = [one.domain_metrics[domain] for one in each if domain in one.domain_metrics]
        if there:
            by_domain_metrics[domain] = {name: mean_value([own[name] for own in there]) for name in metrics}
    if by_domain_metrics:
        for name, value in metrics.items():
            if not isinstance(value, list):
                metrics[name] = mean_value([own[name] for own in by_domain_metrics.values()])
    mean, loss = (sum(getattr(one, what) for one in each) / len(each) for what in ("accuracy", "loss"))
    accuracy = sum(by_domain.values()) / len(by_domain) if by_domain else mean
    return Evaluation(accuracy, loss, by_class, by_domain, metrics, by_domain_metrics)
