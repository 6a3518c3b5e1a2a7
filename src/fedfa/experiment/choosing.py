"""Which round's model is tested, and when to stop early: both go by the validation samples only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfa.errors import ConfigError
from fedfa.learning.round import ServerState

if TYPE_CHECKING:
    from fedfa.experiment.experiment import Experiment


class Choice:
    """The best state of an experiment so far, by ``evaluation.monitor`` on the validation samples.

    Where clients have models of their own, only the last ones are stored, and the last round is chosen.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self.best: tuple[float, ServerState] | None = None
        """The monitored value (larger is better) and the state."""

    @property
    def by_best(self) -> bool:
        """Whether the best round is chosen; else it is the last."""
        experiment = self._experiment
        asked = experiment.config.evaluation.choose
        if asked == "best" and experiment.has_client_models:
            raise ConfigError(
                f"with {experiment.config.algorithm.name!r} clients keep models of their own, of which only the last "
                'are stored; leave evaluation.choose out or set it to "last"'
            )
        return experiment.evaluated_on == "validation" and not experiment.has_client_models and asked != "last"

    @property
    def reason(self) -> str:
        """Why the chosen state was chosen."""
        best = self.by_best and self.best is not None
        return f"best validation {self._experiment.config.evaluation.monitor}" if best else "last round"

    @property
    def state(self) -> ServerState | None:
        """The best state, if it is the one to choose."""
        return self.best[1] if self.best is not None and self.by_best else None

    def consider(self, state: ServerState, evaluation: Mapping[str, Any]) -> None:
        """Remember a state that is better than all before it."""
        if self.by_best and (value := self._value(evaluation)) is not None and (not self.best or value > self.best[0]):
            self.best = value, state

    def best_record(self) -> Mapping[str, Any] | None:
        """The record of the best state; None if the last one is chosen, or nothing was evaluated."""
        return best_of(self._experiment.records, self._value)[1] if self.by_best else None

    def restore(self, state: ServerState) -> None:
        """Continue with the state of the best record, which was saved."""
        value, record = best_of(self._experiment.records, self._value)
        self.best = None if record is None else (value, state)

    def out_of_patience(self) -> bool:
        """Whether too many evaluations in a row were no better than the best before them."""
        patience = self._experiment.config.evaluation.patience
        if patience is None:
            return False
        records = [one for one in self._experiment.records if one.accuracy is not None and not one.final_pass]
        best = best_of(records, self._value)[1]
        if best is None:
            return False
        return len(records) - 1 - next(number for number, one in enumerate(records) if one is best) >= patience

    def _value(self, record: Mapping[str, Any]) -> float | None:
        """What choosing goes by, larger is better; None if the round was not evaluated."""
        monitor, metrics = self._experiment.config.evaluation.monitor, self._experiment.metrics
        lower = monitor == "loss" or any(one.lower_is_better for one in metrics if one.name == monitor)
        return monitored(record, monitor, lower=lower)


def monitored(record: Mapping[str, Any], monitor: str, *, lower: bool) -> float | None:
    """The monitored value of a record, larger is better; None if it has none.

    Example:
        >>> monitored({"loss": 0.5}, "loss", lower=True), monitored({"metrics": {"auroc": 0.9}}, "auroc", lower=False)
        (-0.5, 0.9)
    """
    if monitor == "own_data":
        found = (record.get(monitor) or {}).get("mean")
    else:
        found = record.get(monitor) if monitor in ("accuracy", "loss") else (record.get("metrics") or {}).get(monitor)
    if found is None or isinstance(found, list):
        return None
    return -float(found) if lower else float(found)


def best_of(
    records: Sequence[Mapping[str, Any]], value_of: Callable[[Mapping[str, Any]], float | None]
) -> tuple[float, Mapping[str, Any] | None]:
    """The first of the best records with its value; None if none has a value.

    Example:
        >>> best_of([{"x": 1}, {"x": 3, "y": 0}, {"x": 3}], lambda record: record["x"])
        (3, {'x': 3, 'y': 0})
    """
    best: tuple[float, Mapping[str, Any] | None] = (-math.inf, None)
    for record in records:
        value = value_of(record)
        if value is not None and value > best[0]:
            best = value, record
    return best
