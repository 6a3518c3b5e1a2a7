"""The split of data that were given in Python, as a run records it: nothing else could show it later."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfa.data import Federation
from fedfa.experiment.config import OWN
from fedfa.experiment.run_directory import RunDirectory

if TYPE_CHECKING:
    from fedfa.experiment.experiment import Experiment

MOST_CLIENTS = 250
"""Of more clients than this, as many evenly spaced ones are recorded."""


def record_split(experiment: Experiment, directory: RunDirectory) -> None:
    """Store the split where the data were given in Python; sites keep theirs to themselves."""
    federation = vars(experiment).get("federation")  # not loaded for this purpose alone
    if experiment.config.data.name == OWN and isinstance(federation, Federation):
        directory.write_split(split_values(federation))


def split_values(federation: Federation) -> dict[str, Any]:
    """Samples by client and class, and the key figures of the split, as plain values."""
    count, dataset = len(federation), federation.dataset
    shown = range(count) if count <= MOST_CLIENTS else np.linspace(0, count - 1, MOST_CLIENTS).astype(int).tolist()
    return {
        "classes": list(map(str, dataset.classes)),
        "clients": count,
        "shown": list(shown),
        "counts": [federation.client(client).label_counts.tolist() for client in shown],
        "summary": asdict(federation.summary()),
    }
