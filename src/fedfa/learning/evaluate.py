"""Evaluation of a model: accuracy and loss on a test set, by class and by domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedfa.models.split import SplitModel
from fedfa.trees import NetworkInput, to_device


@dataclass(frozen=True)
class Evaluation:
    """Fractions between 0 and 1. ``accuracy`` is the mean over domains where there are several."""

    accuracy: float
    loss: float
    class_accuracy: list[float | None]
    """None for a class that the test set does not have."""
    domain_accuracy: dict[str, float]


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
    hit, loss = answers(model, inputs, labels, prepare, score=score, batch_size=batch_size, device=device)
    return judge(hit, loss, labels, model.num_classes, domains=domains, domain_names=domain_names)


def answers(
    model: SplitModel,
    inputs: Tensor,
    labels: Tensor,
    prepare: Callable[[Tensor], NetworkInput],
    *,
    score: Callable[[Tensor, Tensor], Tensor] | None = None,
    batch_size: int = 500,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """For each sample, in order: whether the prediction is right, and the cross-entropy. See :func:`evaluate`."""
    device = device or torch.device("cpu")
    hits, losses = [], []
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
    model.module.train(was_training)
    model.outputs = {}
    return torch.cat(hits), torch.cat(losses)


def judge(
    hit: Tensor,
    loss: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    domains: Tensor | None = None,
    domain_names: tuple[str, ...] = (),
) -> Evaluation:
    """The evaluation, from the per-sample results of :func:`answers`."""
    by_class = [
        float(hit[chosen].double().mean()) if (chosen := labels == c).any() else None for c in range(num_classes)
    ]
    by_domain = {}
    if domains is not None and len(domain_names) > 1:
        by_domain = {
            name: float(hit[chosen].double().mean())
            for number, name in enumerate(domain_names)
            if (chosen := domains == number).any()
        }
    accuracy = sum(by_domain.values()) / len(by_domain) if by_domain else float(hit.double().mean())
    return Evaluation(accuracy, float(loss.double().mean()), by_class, by_domain)


def mean_evaluation(each: Sequence[Evaluation]) -> Evaluation:
    """The mean of several models' evaluations; by class and by domain over those that have it."""
    by_class: list[float | None] = []
    for values in zip(*(one.class_accuracy for one in each), strict=True):
        present = [value for value in values if value is not None]
        by_class.append(sum(present) / len(present) if present else None)
    domains = sorted({name for one in each for name in one.domain_accuracy})
    by_domain = {}
    for domain in domains:
        present = [one.domain_accuracy[domain] for one in each if domain in one.domain_accuracy]
        by_domain[domain] = sum(present) / len(present)
    mean, loss = (sum(getattr(one, what) for one in each) / len(each) for what in ("accuracy", "loss"))
    accuracy = sum(by_domain.values()) / len(by_domain) if by_domain else mean
    return Evaluation(accuracy, loss, by_class, by_domain)
