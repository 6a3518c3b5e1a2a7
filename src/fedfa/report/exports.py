"""Exports of runs to TensorBoard and MLflow; exporting again replaces the earlier export."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedfa.errors import FedfaError
from fedfa.experiment.layers import flat
from fedfa.experiment.recorded_runs import RecordedRun

EXPERIMENT = "fedfa"
_TAG = "fedfa.folder"
_MAX_METRICS, _MAX_PARAMETERS = 1000, 100
"""MLflow's limits for one request."""
_EVENTS_SUFFIX = ".fedfa"
"""Suffix of our event files: a second export replaces these and no others."""
_ROUND_VALUES = (
    "accuracy", "loss", "train_loss", "learning_rate", "train_seconds", "cpu_seconds", "samples_per_second",
    "bytes_up", "bytes_down", "epsilon", "clip",
)  # fmt: skip
_MEANS = ("clients", "norm", "extractor", "classifier", "to_mean", "norms", "movement")
"""Lists in the diagnostics that are exported as their mean over clients or classes."""
_NOT_CURVES = {"round", "clients", "holds", "samples", "matrix", "cosines", "edges", "positive", "negative"}
"""Keys of the diagnostics that name things or have too many values for curves."""


def run_names(runs: Sequence[RecordedRun]) -> dict[str, RecordedRun]:
    """Runs by their path relative to their common directory."""
    paths = [run.path.resolve() for run in runs]
    common = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent if paths else Path()
    return {path.relative_to(common).as_posix(): run for path, run in zip(paths, runs, strict=True)}


class Scalar(NamedTuple):
    """A named value after a round."""

    name: str
    round: int
    value: float


def scalars(run: RecordedRun) -> Iterator[Scalar]:
    """Every number of a run's rounds and diagnostics; names of the final pass begin with ``final_pass/``."""
    for record in run.metrics:
        prefix = "final_pass/" if "final_pass" in record else ""
        values: dict[str, Any] = {name: record.get(name) for name in _ROUND_VALUES}
        values |= {f"class_accuracy/{n}": value for n, value in enumerate(record.get("class_accuracy") or [])}
        values |= {f"domain_accuracy/{d}": value for d, value in (record.get("domain_accuracy") or {}).items()}
        for name, value in values.items():
            if _is_number(value):
                yield Scalar(prefix + name, int(record["round"]), float(value))
    for record in run.diagnostics:
        for name, value in _leaves(record, "diagnostics"):
            yield Scalar(name, int(record["round"]), value)


def _leaves(record: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        path = f"{name}/{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        elif isinstance(value, list) and key in _MEANS:
            numbers = [float(one) for one in value if _is_number(one)]
            if numbers and name != "diagnostics":
                yield path, sum(numbers) / len(numbers)
        elif key not in _NOT_CURVES and _is_number(value):
            yield path, float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def export_tensorboard(runs: Sequence[RecordedRun], directory: Path) -> int:
    """Write TensorBoard event files, a directory per run; returns the number of values.

    Raises:
        FedfaError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FedfaError("TensorBoard is not installed: pip install 'fedfa[tensorboard]'") from None
    written = 0
    for name, run in run_names(runs).items():
        for old in (directory / name).glob(f"events.out.tfevents.*{_EVENTS_SUFFIX}"):
            old.unlink()
        writer: Any = SummaryWriter(str(directory / name), filename_suffix=_EVENTS_SUFFIX)
        try:
            for scalar in scalars(run):
                writer.add_scalar(scalar.name, scalar.value, scalar.round)
                written += 1
        finally:
            writer.close()
    return written


def export_mlflow(runs: Sequence[RecordedRun], address: str) -> int:
    """Log runs to MLflow, configuration as parameters and numbers as metrics; returns the number of runs.

    The tracking address is that of a server, a database or a directory.

    Raises:
        FedfaError: MLflow is not installed or reports an error.
    """
    # By default MLflow retries for minutes to reach an absent server.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise FedfaError("MLflow is not installed: pip install 'fedfa[mlflow]'") from None
    try:
        client = MlflowClient(tracking_uri=address)
        known = client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known is not None else client.create_experiment(EXPERIMENT)
        for name, run in run_names(runs).items():
            _log(client, experiment, name, run)
    except MlflowException as error:
        raise FedfaError(f"MLflow at {address}: {error}") from None
    return len(runs)


def _log(client: Any, experiment: str, name: str, run: RecordedRun) -> None:
    from mlflow.entities import Metric, Param

    path = str(run.path.resolve()).replace("'", "")
    for old in client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{path}'"):
        client.delete_run(old.info.run_id)
    identity = client.create_run(experiment, run_name=name, tags={_TAG: path}).info.run_id
    config = [Param(key, str(value)[:6000]) for key, value in flat(run.config).items()]
    for start in range(0, len(config), _MAX_PARAMETERS):
        client.log_batch(identity, params=config[start : start + _MAX_PARAMETERS])
    now = int(1000 * time.time())
    metrics = [Metric(scalar.name, scalar.value, now, scalar.round) for scalar in scalars(run)]
    for start in range(0, len(metrics), _MAX_METRICS):
        client.log_batch(identity, metrics=metrics[start : start + _MAX_METRICS])
    client.set_terminated(identity, status="FINISHED" if run.finished else "RUNNING")
