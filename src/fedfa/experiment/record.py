"""The record of a round, and the figures of a summary, which are made from the records of a run's rounds so far."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedfa.errors import RunError
from fedfa.learning.evaluate import Evaluation
from fedfa.learning.round import RoundStatistics


class RoundRecord(Mapping[str, Any]):
    """What was measured in a round: attributes for reading, a mapping for everything, plain values for JSON.

    Example:
        >>> record = RoundRecord({"round": 3, "accuracy": 0.5, "train_loss": 1.25})
        >>> record.accuracy, record["train_loss"]
        (0.5, 1.25)
        >>> record
        RoundRecord(round=3, accuracy=0.5000, train_loss=1.2500)
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    @classmethod
    def of(
        cls, round: int, evaluation: Mapping[str, Any], measured: RoundStatistics, more: Mapping[str, Any]
    ) -> RoundRecord:
        """The record of a round that was just trained."""
        values = {
            "round": round,
            **evaluation,
            "train_loss": measured.train_loss,
            "cohort": measured.clients,
            "train_seconds": _rounded(measured.seconds),
            "cpu_seconds": _rounded(measured.cpu_seconds),
            "samples_per_second": _rounded(measured.samples / measured.seconds, 1),
            "bytes_up": measured.bytes_up,
            "bytes_down": measured.bytes_down,
            "learning_rate": measured.lr,
            **more,
        }
        return cls(values)

    def extended(self, added: Any, callback: str) -> RoundRecord:
        """The record with what a callback returned, as values for JSON.

        Raises:
            RunError: It is no mapping, replaces a value of the record, or holds something that JSON cannot express.
        """
        if not isinstance(added, Mapping):
            raise RunError(f"callback {callback!r} returned {added!r}; return a dict of further values, or nothing")
        if taken := [key for key in added if key in self]:
            raise RunError(
                f"callback {callback!r} returned {taken[0]!r}, which the record has already; choose another name"
            )
        plain = {}
        for key, value in added.items():
            plain[key] = value.tolist() if isinstance(value, Tensor | np.generic | np.ndarray) else value
            try:
                json.dumps(plain[key], allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RunError(
                    f"callback {callback!r} returned {key!r} = {value!r}: {error}; return plain numbers or text"
                ) from None
        return RoundRecord({**self, **plain})

    @property
    def round(self) -> int:
        """Number of the round, counted from 1; the final pass counts as one more."""
        return int(self._values["round"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy; the mean over domains where there are several. None if not evaluated.

        On the test set, or with ``data.validation`` on validation samples: ``record["evaluated"]["on"]`` says which.
        """
        return self._optional("accuracy")

    @property
    def loss(self) -> float | None:
        """Mean cross-entropy over the same samples; None if not evaluated."""
        return self._optional("loss")

    @property
    def train_loss(self) -> float | None:
        """Mean of the clients' mean local losses; None if no client made a step."""
        return self._optional("train_loss")

    @property
    def cohort(self) -> list[int]:
        """The clients that took part."""
        return list(self._values["cohort"])

    @property
    def learning_rate(self) -> float:
        """The local learning rate of the round."""
        return float(self._values["learning_rate"])

    @property
    def final_pass(self) -> bool:
        """Whether this is the record of the final pass after the last round."""
        return bool(self._values.get("final_pass", False))

    def _optional(self, name: str) -> float | None:
        value = self._values.get(name)
        return None if value is None else float(value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a line of ``metrics.jsonl``."""
        return dict(self._values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"the record has no {name!r}; it has {', '.join(self._values)}")
        return self._values[name]

    def __repr__(self) -> str:
        shown = {name: self._values.get(name) for name in ("accuracy", "loss", "train_loss")}
        parts = [f"{name}={value:.4f}" for name, value in shown.items() if value is not None]
        return f"RoundRecord({', '.join([f'round={self.round}', *parts])})"


def evaluation_values(evaluation: Evaluation | None) -> dict[str, Any]:
    """An evaluation as values of a record; all None where there was none."""
    if evaluation is None:
        return dict.fromkeys(("accuracy", "loss", "class_accuracy", "domain_accuracy"))
    loss = evaluation.loss if math.isfinite(evaluation.loss) else None  # JSON has no infinity
    by = {"class_accuracy": evaluation.class_accuracy, "domain_accuracy": evaluation.domain_accuracy}
    further = {name: found for name in ("metrics", "domain_metrics") if (found := getattr(evaluation, name))}
    return {"accuracy": evaluation.accuracy, "loss": loss, **by, **further}


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}f}")


def accuracies(metrics: Sequence[Mapping[str, Any]], tested: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Always final, best and the mean of the last ten evaluations, named as such; empty before the first evaluation.

    With a final pass, the final accuracy is the one after it; the best is that of all evaluations, the final pass
    included, and the mean is that of the rounds. Of fewer than ten evaluations, ``last10_count`` is their number.

    Args:
        metrics: The records.
        tested: With ``data.validation``, the evaluation of the chosen model on the test set; the final accuracy is that
            one, the best and the mean are on the validation samples.

    Example:
        >>> accuracies([{"accuracy": 0.5}, {"accuracy": None}, {"accuracy": 0.25}])
        {'final_accuracy': 0.25, 'best_accuracy': 0.5, 'last10_accuracy': 0.375, 'last10_count': 2}
    """
    evaluated = [
        record["accuracy"] for record in metrics if record["accuracy"] is not None and "final_pass" not in record
    ]
    after = [record["accuracy"] for record in metrics if "final_pass" in record]
    if not evaluated:
        return {}
    last = evaluated[-10:]
    final = after[-1] if after else evaluated[-1]
    return {
        "final_accuracy": final if tested is None else tested["accuracy"],
        **({"accuracy_before_final_pass": evaluated[-1]} if after else {}),
        "best_accuracy": max([*evaluated, *after]),
        "last10_accuracy": sum(last) / len(last),
        **({"last10_count": len(last)} if len(last) < 10 else {}),
    }


def whose_accuracy(metrics: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Whose model the last evaluation was of, and on what.

    Records that do not say so are of the global model on the test set; before 0.2 of the clients' models, too.
    """
    for record in reversed(metrics):
        if record.get("accuracy") is not None:
            found = record.get("evaluated") or {}
            model = "clients" if "client_accuracy" in record else "global"
            return {"model": found.get("model", model), "on": found.get("on", "test")}
    return {}


def costs(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of training, processor time, bytes to and from clients; virtual seconds, ε and δ where there are some."""
    spent = [record for record in metrics if record.get("epsilon") is not None]
    return {
        "seconds": round(sum(record["train_seconds"] for record in metrics), 2),
        "cpu_seconds": round(sum(record.get("cpu_seconds", 0.0) for record in metrics), 2),
        "bytes_up": sum(record["bytes_up"] for record in metrics),
        "bytes_down": sum(record["bytes_down"] for record in metrics),
        **({"time": metrics[-1]["time"]} if metrics and "time" in metrics[-1] else {}),
        **({name: spent[-1][name] for name in ("epsilon", "delta")} if spent else {}),
    }
