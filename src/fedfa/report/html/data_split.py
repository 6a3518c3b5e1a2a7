"""The split of a run's data over its clients, recomputed from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfa.data import SplitSummary, load
from fedfa.errors import FedfaError
from fedfa.experiment.config import OWN, DataConfig
from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.experiment.run_directory import RunDirectory
from fedfa.report.partition_picture import client_domains, evenly_spaced

_MAX_CLIENTS = 250
"""More clients are subsampled evenly: a column would be narrower than two pixels."""


@dataclass(frozen=True)
class Split:
    """Samples by client and class."""

    classes: tuple[str, ...]
    shown: tuple[int, ...]
    """Indices of the clients in ``counts``: all, or evenly spaced ones."""
    counts: tuple[tuple[int, ...], ...]
    """Samples by class of these clients."""
    held: tuple[str, ...]
    """Domain of each of these clients; empty if clients hold several domains, or there are none."""
    clients: int
    numbers: SplitSummary


class Splits:
    """Computes splits and caches them: a page that is written again loads no data twice."""

    def __init__(self) -> None:
        self._known: dict[str, Split | str] = {}

    def of(self, run: RecordedRun) -> Split | str:
        """The split of a run; as text why there is none, e.g. because the data set is not on this machine."""
        own = str(run.path) if run.config.get("data", {}).get("name") == OWN else ""
        key = repr(sorted(run.config.get("data", {}).items())) + str(_fingerprint(run)) + own
        if key not in self._known:
            try:
                self._known[key] = _make(run)
            except FedfaError as error:
                self._known[key] = " ".join(str(error).split())
        return self._known[key]


def _fingerprint(run: RecordedRun) -> str | None:
    """Fingerprint of the run's data, if recorded."""
    found: Any = None
    if run.summary is not None and isinstance(run.summary.get("data"), Mapping):
        found = run.summary["data"].get("fingerprint")
    else:
        with suppress(OSError, ValueError, AttributeError):
            found = RunDirectory(run.path).origin().get("data")
    return None if found is None else str(found)


def _recorded(values: Mapping[str, Any]) -> Split | str:
    """The split that the run recorded of data given in Python."""
    try:
        numbers = SplitSummary(**values["summary"])
        counts = tuple(tuple(int(count) for count in row) for row in values["counts"])
        shown = tuple(int(client) for client in values["shown"])
        return Split(tuple(map(str, values["classes"])), shown, counts, (), int(values["clients"]), numbers)
    except (KeyError, TypeError, ValueError) as error:
        return f"split.json cannot be read ({error})"


def _make(run: RecordedRun) -> Split | str:
    try:
        asked = DataConfig.model_validate(run.config.get("data", {}))
    except ValueError:
        return "the configuration of its data cannot be read"
    if (recorded := RunDirectory(run.path).split()) is not None:
        return _recorded(recorded)
    if asked.name == OWN:
        return "its data were passed in Python or belong to sites, so the configuration does not name them"
    directory = Path(asked.dir).expanduser() if asked.dir else None
    dataset = load(asked.name, data_dir=directory, offline=True, columns=asked.columns)
    expected = _fingerprint(run)
    if expected not in (None, dataset.fingerprint):
        return f"the data set {asked.name!r} on this machine is not the one of the run"
    federation = dataset.split(asked.partition, asked.clients, asked.seed)
    shown = tuple(evenly_spaced(len(federation), _MAX_CLIENTS).tolist())
    counts = tuple(tuple(federation.client(client).label_counts.tolist()) for client in shown)
    held = client_domains(federation, shown) if len(dataset.domains) > 1 else ()
    return Split(tuple(dataset.classes), shown, counts, held, len(federation), federation.summary())
