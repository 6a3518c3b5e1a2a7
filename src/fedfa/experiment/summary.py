"""The figures of a summary, from the records of a run's rounds so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def accuracies(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Always final, best and the mean of the last ten evaluations, named as such; empty before the first evaluation.

    With a final pass, the final accuracy is the one after it; best and mean are those of the rounds.

    Example:
        >>> accuracies([{"accuracy": 0.5}, {"accuracy": None}, {"accuracy": 0.25}])
        {'final_accuracy': 0.25, 'best_accuracy': 0.5, 'last10_accuracy': 0.375}
    """
    evaluated = [
        record["accuracy"] for record in metrics if record["accuracy"] is not None and "final_pass" not in record
    ]
    after = [record["accuracy"] for record in metrics if "final_pass" in record]
    if not evaluated:
        return {}
    return {
        "final_accuracy": after[-1] if after else evaluated[-1],
        **({"accuracy_before_final_pass": evaluated[-1]} if after else {}),
        "best_accuracy": max(evaluated),
        "last10_accuracy": sum(evaluated[-10:]) / len(evaluated[-10:]),
    }


def costs(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of training by the clock, processor time of the clients, bytes to and from them."""
    return {
        "seconds": round(sum(record["train_seconds"] for record in metrics), 2),
        "cpu_seconds": round(sum(record.get("cpu_seconds", 0.0) for record in metrics), 2),
        "bytes_up": sum(record["bytes_up"] for record in metrics),
        "bytes_down": sum(record["bytes_down"] for record in metrics),
    }
