"""The numbers of a run as a stream of named values, for other programs' dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedfa.report.html.reading import Run


class Scalar(NamedTuple):
    """A value with its name, after a round."""

    name: str
    round: int
    value: float


_OF_A_ROUND = (
    "accuracy", "loss", "train_loss", "learning_rate", "train_seconds", "cpu_seconds", "samples_per_second",
    "bytes_up", "bytes_down",
)  # fmt: skip


def scalars(run: Run) -> Iterator[Scalar]:
    """Every number of a run's rounds and of what was seen inside training; lists by client give their mean.

    What a survey after the last round gave has names that begin with ``survey/``.
    """
    for record in run.metrics:
        number = int(record["round"])
        before = "survey/" if "survey" in record else ""
        for name in _OF_A_ROUND:
            if _is_number(record.get(name)):
                yield Scalar(before + name, number, float(record[name]))
        for label, value in enumerate(record.get("class_accuracy") or []):
            if _is_number(value):
                yield Scalar(f"{before}class_accuracy/{label}", number, float(value))
        for domain, value in (record.get("domain_accuracy") or {}).items():
            if _is_number(value):
                yield Scalar(f"{before}domain_accuracy/{domain}", number, float(value))
    for record in run.insight:
        for name, value in _leaves(record, "insight"):
            yield Scalar(name, int(record["round"]), value)


#: Parts of an insight record that name things, or are too many to be curves.
_NOT_CURVES = {"round", "clients", "holds", "samples", "matrix", "cosines", "edges", "positive", "negative"}


def _leaves(record: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        path = f"{name}/{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        elif isinstance(value, list) and key in (
            "clients",
            "norm",
            "extractor",
            "classifier",
            "to_mean",
            "norms",
            "movement",
        ):
            numbers = [float(one) for one in value if _is_number(one)]
            if numbers and name != "insight":
                yield path, sum(numbers) / len(numbers)
        elif key not in _NOT_CURVES and _is_number(value):
            yield path, float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
