"""Evaluations at the sites, combined as if their test samples were in one place, each with a bounded share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fedfa.flower.messages import SiteEvaluation
from fedfa.learning.evaluate import Evaluation


def limit_counts(site: SiteEvaluation, each: Sequence[SiteEvaluation], share: float) -> SiteEvaluation:
    """A site's evaluation with no more than this share of the test samples of all sites.

    Example:
        >>> honest = SiteEvaluation(0, Evaluation(0.5, 0.5, [0.5], {}), (10,))
        >>> boasting = SiteEvaluation(1, Evaluation(1.0, 0.0, [1.0], {}), (2**40,))
        >>> limit_counts(boasting, [honest, boasting], 0.5).class_counts
        (10,)
    """
    samples = sum(site.class_counts)
    others = sum(sum(one.class_counts) for one in each) - samples
    most = others * share / (1 - share) if share < 1 else math.inf
    if samples <= most or not others:
        return site
    reduced = [
        tuple(math.ceil(n * most / samples) for n in counts) for counts in (site.class_counts, site.domain_counts)
    ]
    return replace(site, class_counts=reduced[0], domain_counts=reduced[1])


def combine(each: Sequence[SiteEvaluation]) -> Evaluation:
    """Combine the evaluations of several sites as if their test samples were in one place.

    Example:
        >>> a = SiteEvaluation(0, Evaluation(1.0, 0.1, [1.0, None], {}), (3, 0))
        >>> b = SiteEvaluation(1, Evaluation(0.0, 0.5, [0.0, 0.0], {}), (1, 0))
        >>> combine([a, b]).accuracy
        0.75
    """
    classes: dict[int, list[tuple[float, int]]] = {}
    domains: dict[str, list[tuple[float, int]]] = {}
    for site in each:
        evaluation = site.evaluation
        for number, (value, count) in enumerate(zip(evaluation.class_accuracy, site.class_counts, strict=True)):
            classes.setdefault(number, []).append((value or 0.0, count))
        for (name, accuracy), count in zip(evaluation.domain_accuracy.items(), site.domain_counts, strict=True):
            domains.setdefault(name, []).append((accuracy, count))
    by_class = [_accuracy(pairs) if any(count for _, count in pairs) else None for pairs in classes.values()]
    by_domain = {name: _accuracy(domains[name]) for name in sorted(domains)}
    overall = _accuracy([pair for pairs in classes.values() for pair in pairs])
    several = all(site.evaluation.domain_accuracy for site in each)
    sizes = [sum(site.class_counts) for site in each]
    loss = sum(size * site.evaluation.loss for size, site in zip(sizes, each, strict=True)) / sum(sizes)
    return Evaluation(sum(by_domain.values()) / len(by_domain) if several else overall, loss, by_class, by_domain)


def _accuracy(pairs: Sequence[tuple[float, int]]) -> float:
    """Accuracy over several sets of samples, each given by its accuracy and size.

    Numbers of correct samples are integers, so rounding recovers them and the result is exact.
    """
    return sum(round(accuracy * count) for accuracy, count in pairs) / sum(count for _, count in pairs)
