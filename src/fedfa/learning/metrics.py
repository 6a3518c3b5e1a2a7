"""Metrics of an evaluation beyond accuracy, as functions of labels and scores.

Every average has one definition, and records name it (:func:`averages`):

- over **samples**: each sample counts once;
- over **classes**: the plain mean over the classes that occur in the labels;
- over **domains**, where a test set has several: a metric is computed in each domain, then the plain mean is taken;
- over **clients**, where each client has its own model: computed for each client, then the plain mean is taken.

Written here in NumPy, without scikit-learn or torchmetrics: a page of arithmetic needs no dependency, and a class that
a test set lacks then has the same effect on every metric. The tests compare with scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedfa.error_messages import nearest
from fedfa.errors import ConfigError, ModelError, RunError, describe
from fedfa.models.reference import network_reference, referenced

Labels: TypeAlias = npt.NDArray[np.int64]
Scores: TypeAlias = npt.NDArray[np.floating[Any]]
Function: TypeAlias = Callable[[Any, Any], Any]
"""From labels ``int64 [N]`` and scores ``float32 [N, C]`` (the largest is the prediction) to a number or a list."""
Value: TypeAlias = float | list[Any] | None
"""None where a metric is not defined, as AUROC with a single class."""

OWN = "own:"
"""Prefix of the names of functions that were given in Python and cannot be found again by name."""


@dataclass(frozen=True)
class Metric:
    """A metric by the name under which records have it."""

    name: str
    function: Function
    average: str = "samples"
    """What it averages over: ``samples``, or ``classes`` (of the values of each class)."""
    lower_is_better: bool = False

    def __call__(self, labels: Labels, scores: Scores) -> Value:
        """Compute it.

        Raises:
            RunError: The function fails, or returns something else than numbers.
        """
        if not len(labels):
            return None
        try:
            return plain(self.function(labels, scores))
        except Exception as error:
            raise RunError(
                f"metric {self.name!r}: {describe(error)}; it receives labels [N] and scores [N, C]"
            ) from error


def plain(value: Any) -> Value:
    """A result as values for JSON; NaN and infinity become None.

    Example:
        >>> plain(np.float32(0.5)), plain(np.array([[1, 2]])), plain(float("nan"))
        (0.5, [[1, 2]], None)
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"returned {value!r}; return a number or a list of numbers")


# -- what is computed -------------------------------------------------------------------------------------------------
def probabilities(scores: Scores) -> Scores | None:
    """The softmax of the scores, in double precision; None where a score is not finite."""
    if not np.isfinite(scores).all():
        return None
    shifted = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    shares: Scores = shifted / shifted.sum(axis=1, keepdims=True)
    return shares


def confusion_matrix(labels: Labels, scores: Scores) -> npt.NDArray[np.int64]:
    """Number of samples by true class (rows) and predicted class (columns)."""
    classes = scores.shape[1]
    cells = np.bincount(labels * classes + scores.argmax(axis=1), minlength=classes * classes)
    return cells.reshape(classes, classes).astype(np.int64)


def recalls(labels: Labels, scores: Scores) -> npt.NDArray[np.float64]:
    """Accuracy on each class; NaN for a class without samples."""
    table = confusion_matrix(labels, scores)
    with np.errstate(invalid="ignore"):
        return np.asarray(table.diagonal() / table.sum(axis=1), dtype=np.float64)


def f1_scores(labels: Labels, scores: Scores) -> npt.NDArray[np.float64]:
    """F1 of each class, 2·TP / (2·TP + FP + FN); NaN for a class without samples."""
    table = confusion_matrix(labels, scores)
    right, held, predicted = table.diagonal(), table.sum(axis=1), table.sum(axis=0)
    with np.errstate(invalid="ignore"):
        return np.where(held > 0, 2 * right / (held + predicted), np.nan)


def aurocs(labels: Labels, scores: Scores) -> npt.NDArray[np.float64]:
    """Area under the ROC curve of each class against the rest; NaN unless both occur.

    It is the share of pairs of a sample of the class and another one in which the former has the higher probability;
    ties count half.
    """
    shares = probabilities(scores)
    found = np.full(scores.shape[1], np.nan)
    for number in range(scores.shape[1] if shares is not None else 0):
        assert shares is not None
        positive = labels == number
        count, others = int(positive.sum()), int((~positive).sum())
        if count and others:
            _, place, repeated = np.unique(shares[:, number], return_inverse=True, return_counts=True)
            rank = np.cumsum(repeated) - (repeated - 1) / 2  # mean rank of tied values, from 1
            found[number] = (rank[place][positive].sum() - count * (count + 1) / 2) / (count * others)
    return found


def average_precisions(labels: Labels, scores: Scores) -> npt.NDArray[np.float64]:
    """Average precision of each class against the rest, Σ (R_n − R_{n−1}) P_n over thresholds; NaN without samples."""
    shares = probabilities(scores)
    found = np.full(scores.shape[1], np.nan)
    for number in range(scores.shape[1] if shares is not None else 0):
        assert shares is not None
        positive = labels == number
        if positive.any():
            order = np.argsort(-shares[:, number], kind="stable")
            ends = np.append(np.flatnonzero(np.diff(shares[order, number])), len(order) - 1)  # last of tied values
            right = np.cumsum(positive[order])[ends]
            found[number] = (np.diff(right, prepend=0) * right / (ends + 1)).sum() / positive.sum()
    return found


def calibration_error(labels: Labels, scores: Scores, bins: int = 15) -> float:
    """Expected calibration error: |accuracy − confidence| over bins of equal width, weighted by their samples.

    C. Guo, G. Pleiss, Y. Sun, K. Q. Weinberger, *On Calibration of Modern Neural Networks*, ICML 2017. The confidence
    is the probability of the predicted class; a bin is open to the left.
    """
    shares = probabilities(scores)
    if shares is None:
        return math.nan
    confidence, right = shares.max(axis=1), scores.argmax(axis=1) == labels
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = np.bincount(place, weights=right.astype(np.float64) - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(labels))


def top_accuracy(labels: Labels, scores: Scores, k: int) -> float:
    """Share of samples whose class is among the k highest scores; of equal scores the first class counts as higher."""
    own = np.take_along_axis(scores, labels[:, None], axis=1)
    ahead = (scores > own).sum(axis=1) + ((scores == own) & (np.arange(scores.shape[1]) < labels[:, None])).sum(axis=1)
    return float(((ahead < k) & np.isfinite(own[:, 0])).mean())


# -- by name ----------------------------------------------------------------------------------------------------------
def _mean(each: Callable[[Labels, Scores], npt.NDArray[np.float64]]) -> Function:
    """The mean over classes that have a value; NaN if none has one."""

    def function(labels: Labels, scores: Scores) -> float:
        values = each(labels, scores)
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else math.nan

    return function


def _of_class(each: Callable[[Labels, Scores], npt.NDArray[np.float64]], number: int) -> Function:
    def function(labels: Labels, scores: Scores) -> float:
        if number >= scores.shape[1]:
            raise ValueError(f"there is no class {number}; they are 0 to {scores.shape[1] - 1}")
        return float(each(labels, scores)[number])

    return function


_BY_CLASS: Mapping[str, Callable[[Labels, Scores], npt.NDArray[np.float64]]] = {
    "recall": recalls, "f1": f1_scores, "auroc": aurocs, "average_precision": average_precisions,
}  # fmt: skip
_MEANS = {"balanced_accuracy": "recall", "macro_f1": "f1", "auroc": "auroc", "average_precision": "average_precision"}
KNOWN = (
    "balanced_accuracy", "macro_f1", "auroc", "average_precision", "calibration_error", "top:K", "confusion_matrix",
    "recall:CLASS", "f1:CLASS", "auroc:CLASS", "average_precision:CLASS", "calibration_error:BINS",
)  # fmt: skip
"""What ``evaluation.metrics`` can name, beside ``FILE.py:FUNCTION``; CLASS is a class by number."""


def metric(name: str, given: Mapping[str, Function] | None = None) -> Metric:
    """A metric by name.

    Args:
        name: One of :data:`KNOWN`, or ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
        given: Functions that were given in Python, by name.

    Raises:
        ConfigError: There is no such metric.

    Example:
        >>> metric("top:2")(np.array([2, 0]), np.array([[0.2, 0.1, 0.7], [0.1, 0.5, 0.4]]))
        0.5
    """
    if given and name in given:
        return Metric(name, given[name])
    if name.startswith(OWN):
        raise ConfigError(
            f"the metric {name.removeprefix(OWN)!r} was given in Python and cannot be found by name; give it again: "
            "metrics=[…]"
        )
    kind, colon, text = name.partition(":")
    if not colon and kind in _MEANS:
        return Metric(name, _mean(_BY_CLASS[_MEANS[kind]]), "classes")
    if not colon and kind == "confusion_matrix":
        return Metric(name, confusion_matrix, "counts")
    if not colon and kind == "calibration_error":
        return Metric(name, calibration_error, lower_is_better=True)
    if colon and text.isdecimal():
        count = int(text)
        if kind in _BY_CLASS:
            return Metric(name, _of_class(_BY_CLASS[kind], count))
        if kind == "top" and count:
            return Metric(name, lambda labels, scores: top_accuracy(labels, scores, count))
        if kind == "calibration_error" and count:
            return Metric(name, lambda y, scores: calibration_error(y, scores, count), lower_is_better=True)
    if is_own(name):
        return Metric(name, _referenced(name))
    raise ConfigError(
        f"unknown metric {name!r}{nearest(name, KNOWN)}; known: {', '.join(KNOWN)}, and your own as FILE.py:FUNCTION"
    )


def _referenced(name: str) -> Function:
    try:
        function: Any = referenced(name, "metric")
    except ModelError as error:
        raise ConfigError(f"evaluation.metrics: {error}") from None
    if not callable(function):
        raise ConfigError(f"evaluation.metrics: {name} is no function; name a function of (labels, scores)")
    checked: Function = function
    return checked


def is_own(name: str) -> bool:
    """Whether a name is that of a function of the user's.

    Example:
        >>> is_own("mine.py:kappa"), is_own("own:kappa"), is_own("top:5")
        (True, True, False)
    """
    return ":" in name and ("." in name or name.startswith((OWN, "__main__")))


def name_of(asked: str | Function) -> str:
    """The name under which a config holds a metric that was given in Python."""
    if isinstance(asked, str):
        return asked
    if not callable(asked):
        raise ConfigError(f"metrics holds {asked!r}; give names ({', '.join(KNOWN)}) or functions of (labels, scores)")
    return network_reference(asked) or f"{OWN}{getattr(asked, '__name__', type(asked).__name__)}"


def averages(metrics: Sequence[Metric], *, domains: bool, clients: bool) -> dict[str, str]:
    """What each value of an evaluation averages over, from the inside out.

    Example:
        >>> averages([metric("macro_f1")], domains=True, clients=False)["macro_f1"]
        'classes, domains'
    """
    by_client = ["clients"] if clients else []
    means = {"accuracy": "samples", **{one.name: one.average for one in metrics}}
    by_domain = [*by_client, "domains"] if domains else by_client
    labels = {
        name: ", ".join([inside, *(by_client if inside == "counts" else by_domain)]) for name, inside in means.items()
    }
    over_samples = ", ".join(["samples", *by_client])
    return {**labels, "loss": over_samples, "class_accuracy": over_samples}
