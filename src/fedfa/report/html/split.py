"""The split of a run's data over its clients, made again from the settings: it is the same, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfa.data import Federation, load, partition
from fedfa.data.skew import SplitSummary, summary
from fedfa.errors import FedfaError
from fedfa.report.html.reading import Run
from fedfa.studies.settings import OWN, DataSettings

#: More clients than this are thinned out evenly: a column would be narrower than a pixel or two.
_MOST_CLIENTS = 250


@dataclass(frozen=True)
class Split:
    """Samples by client and class."""

    classes: tuple[str, ...]
    domains: tuple[str, ...]
    shown: tuple[int, ...]
    """Numbers of the clients in ``counts``: all of them, or evenly spaced ones."""
    counts: tuple[tuple[int, ...], ...]
    """For each of these clients, its samples by class."""
    held: tuple[str, ...]
    """For each of these clients, the name of its domain; empty where clients hold several or there are none."""
    clients: int
    seed: int
    numbers: SplitSummary


class Splits:
    """Makes splits, and remembers them: a page that is written again needs no data twice."""

    def __init__(self) -> None:
        self._known: dict[str, Split | str] = {}

    def of(self, run: Run) -> Split | str:
        """The split of a run; in words why there is none, where the data are not at hand or are others."""
        key = repr(sorted(run.config.get("data", {}).items())) + str(_fingerprint(run))
        if key not in self._known:
            try:
                self._known[key] = _make(run)
            except FedfaError as error:
                self._known[key] = " ".join(str(error).split())
        return self._known[key]


def _fingerprint(run: Run) -> str | None:
    """What the run's data were."""
    recorded: Any
    if run.summary is not None and isinstance(run.summary.get("data"), Mapping):
        recorded = run.summary["data"]
    else:
        try:
            recorded = json.loads((run.folder / "origin.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        recorded = {"fingerprint": recorded.get("data")} if isinstance(recorded, dict) else {}
    found = recorded.get("fingerprint")
    return None if found is None else str(found)


def _make(run: Run) -> Split | str:
    try:
        asked = DataSettings.model_validate(run.config.get("data", {}))
    except ValueError:
        return "the settings of its data cannot be read"
    if asked.name == OWN:
        return "its data were not named in the settings, but given in Python or by the sites"
    directory = Path(asked.dir).expanduser() if asked.dir else None
    dataset = load(asked.name, data_dir=directory, offline=True)
    expected = _fingerprint(run)
    if expected not in (None, dataset.fingerprint):
        return f"the data set {asked.name!r} on this machine is not the one of the run"
    federation = Federation(
        dataset, partition(dataset.train, asked.partition, asked.number_of_clients, dataset.num_classes, asked.seed)
    )
    number = len(federation)
    shown = np.arange(number) if number <= _MOST_CLIENTS else np.linspace(0, number - 1, _MOST_CLIENTS).astype(np.int64)
    counts = tuple(tuple(federation.client(int(client)).label_counts.tolist()) for client in shown)
    return Split(
        tuple(dataset.classes), tuple(dataset.domains), tuple(int(client) for client in shown), counts,
        _domains(federation, shown), number, asked.seed, summary(federation),
    )  # fmt: skip


def _domains(federation: Federation, shown: np.ndarray) -> tuple[str, ...]:
    domains = federation.dataset.train.domains
    if domains is None or len(federation.dataset.domains) < 2:
        return ()
    names = []
    for client in shown:
        of = np.unique(domains.numpy()[federation.partition.client(int(client))])
        if len(of) > 1:
            return ()
        names.append(federation.dataset.domains[int(of[0])] if len(of) else "")
    return tuple(names)
