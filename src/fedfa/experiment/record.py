"""The record of a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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

    @property
    def round(self) -> int:
        """Number of the round, counted from 1; the final pass counts as one more."""
        return int(self._values["round"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test set; the mean over domains where there are several. None if not evaluated."""
        return self._optional("accuracy")

    @property
    def loss(self) -> float | None:
        """Mean cross-entropy on the test set; None if not evaluated."""
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
