"""Runs for MLflow: settings as parameters, numbers as metrics, once for each run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from fedfa.errors import FedfaError
from fedfa.report.html.reading import Run
from fedfa.report.names import run_names
from fedfa.report.scalars import scalars
from fedfa.studies.layers import flat

EXPERIMENT = "fedfa"
_FOLDER = "fedfa.folder"
_METRICS, _PARAMETERS = 1000, 100
"""MLflow takes no more in one request."""


def export_mlflow(runs: Sequence[Run], address: str) -> int:
    """Log runs to an MLflow server or store; a run that was logged before is replaced. Returns how many were logged.

    Args:
        runs: What to log.
        address: MLflow's tracking address: a server, a data base or a folder.

    Raises:
        FedfaError: MLflow is not installed, or does not answer as it should.
    """
    # MLflow tries for minutes to reach a server that is not there; whoever wants that can still say so.
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


def _log(client: Any, experiment: str, name: str, run: Run) -> None:
    from mlflow.entities import Metric, Param

    folder = str(run.folder.resolve())
    quoted = folder.replace("'", "")
    for old in client.search_runs([experiment], filter_string=f"tags.`{_FOLDER}` = '{quoted}'"):
        client.delete_run(old.info.run_id)
    made = client.create_run(experiment, run_name=name, tags={_FOLDER: quoted}).info.run_id
    settings = [Param(key, str(value)[:6000]) for key, value in flat(run.config).items()]
    for start in range(0, len(settings), _PARAMETERS):
        client.log_batch(made, params=settings[start : start + _PARAMETERS])
    now = int(1000 * time.time())
    metrics = [Metric(scalar.name, scalar.value, now, scalar.round) for scalar in scalars(run)]
    for start in range(0, len(metrics), _METRICS):
        client.log_batch(made, metrics=metrics[start : start + _METRICS])
    client.set_terminated(made, status="FINISHED" if run.finished else "RUNNING")
