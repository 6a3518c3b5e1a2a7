"""The run folder: the record of a run, and all that is needed to go on with it.

====================  =============================================================================================
``config.toml``       the settings, complete
``origin.json``       what the settings do not fix: fingerprints of data, network and method files
``metrics.jsonl``     one object a round
``summary.json``      the result, once the run is finished
``checkpoint.safetensors``  the server's state after the last saved round
``clients/``          what clients keep between rounds, one file per client and version
``insight.jsonl``, ``insight/``  what was seen inside, where somebody looked (see :mod:`fedfa.insight`)
``model.safetensors``, ``server.safetensors``  the final model; the final state of the server (anchors …)
====================  =============================================================================================

A checkpoint is the commit point. Clients' files are written before it under new names and deleted after it, and the
metrics (and what was seen inside) are cut back to it on resume, so a run that was killed at any moment goes on from a
consistent state.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from fedfa.errors import RunError
from fedfa.insight.records import InsightRecords
from fedfa.learning.server import ServerState
from fedfa.learning.tensors import PartTensors, Tensors, flatten, unflatten
from fedfa.studies.files import (
    append_line,
    load_tensors,
    read_lines,
    save_tensors,
    settle,
    write_atomically,
    write_lines,
)
from fedfa.studies.settings import Settings, read_toml

_CLIENTS = "kept_by_clients"
_RESULT = ("final_accuracy", "best_accuracy", "last10_accuracy", "rounds")
"""What every summary has."""


class _InUseError(RunError):
    """Another process holds the folder's lock."""


class RunFolder:
    """Reads and writes one run folder; holds a lock on it while a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.insight = InsightRecords(path)
        self._versions: dict[int, int] = {}
        self._unsaved: dict[int, int] = {}
        self._obsolete: list[Path] = []
        self._lock: int | None = None

    # -- opening ----------------------------------------------------------------------------------------------
    def create(self, settings: Settings) -> None:
        """Begin a new record. A run that failed before its first round was saved is written over: nothing is lost.

        Raises:
            RunError: There is a run here already, or the folder cannot be written.
        """
        try:
            (self.path / "clients").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from None
        self._acquire()
        if self.holds_run():
            raise RunError(
                f"{self.path} holds a run already; go on with it by --resume (from Python: resume=True), or choose "
                "another --out"
            )
        self._cut_metrics(0)
        (self.path / "origin.json").unlink(missing_ok=True)
        write_atomically(self.path / "config.toml", settings.to_toml())

    def holds_run(self) -> bool:
        """Whether there is something to lose: a saved round, or a result."""
        return any((self.path / name).exists() for name in ("checkpoint.safetensors", "summary.json"))

    def reopen(self) -> ServerState | None:
        """Take up the record again: the state to go on from, or None if no round was saved yet."""
        self._acquire()
        for leftover in self.path.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        state = self.saved()
        if state is not None or self.summary() is None:
            current = {self._client_file(client, version) for client, version in self._versions.items()}
            for file in (self.path / "clients").glob("*.safetensors"):
                if file not in current:
                    file.unlink()
        if self.summary() is None:  # a finished run's record is whole; a survey's line comes after the last checkpoint
            self._cut_metrics(0 if state is None else state.round)
        return state

    def saved(self) -> ServerState | None:
        """The state after the last saved round, None if there is none; :meth:`load_kept` then is what belongs to it.

        Only reads: the run is not taken up, and another process may be at work on it.
        """
        checkpoint = self.path / "checkpoint.safetensors"
        self._versions = {}
        if not checkpoint.exists():
            return None
        tensors = load_tensors(checkpoint)
        self._versions = {int(client): int(version) for client, version in tensors.pop(_CLIENTS).tolist()}
        return ServerState.from_tensors(tensors)

    def settings(self) -> Settings:
        """The settings the run was started with."""
        path = self.path / "config.toml"
        if not path.exists():
            raise RunError(f"{self.path} holds no run (no config.toml)")
        return Settings.resolve(read_toml(path))

    def origin(self) -> dict[str, str]:
        """What the run is made of besides its settings; empty before that was recorded."""
        path = self.path / "origin.json"
        recorded: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return recorded

    def check_origin(self, origin: dict[str, str]) -> None:
        """Record what the run is made of besides its settings; on resume, refuse to go on with something else."""
        path = self.path / "origin.json"
        if not path.exists():
            write_atomically(path, json.dumps(origin, indent=2) + "\n")
            return
        recorded = self.origin()
        if changed := [
            what for what in sorted(recorded.keys() | origin.keys()) if recorded.get(what) != origin.get(what)
        ]:
            raise RunError(
                f"{self.path} cannot go on: {', '.join(changed)} changed since it was started; put back what it was "
                "started with, or choose another --out"
            )

    def in_use(self) -> bool:
        """Whether a process is writing here now."""
        if not self.path.is_dir():
            return False
        try:
            self._acquire()
        except _InUseError:
            return True
        except RunError:  # not ours to write: whoever tries will be told
            return False
        self.close()
        return False

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- writing ----------------------------------------------------------------------------------------------
    def extend(self, settings: Settings, done: int) -> None:
        """Record settings that ask for more rounds than are done; the result of the shorter run no longer stands."""
        (self.path / "summary.json").unlink(missing_ok=True)  # first: with it, the run would count as finished
        self._cut_metrics(done)
        write_atomically(self.path / "config.toml", settings.to_toml())

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add a round's record; it is safe from a power failure from the next checkpoint on."""
        append_line(self.path / "metrics.jsonl", record)

    def save_kept(self, client: int, round: int, kept: PartTensors) -> None:
        """Store what a client keeps; counts from the next checkpoint on."""
        if not kept and client not in self._versions and client not in self._unsaved:
            return  # a client that never kept anything needs no file; one that cleared what it kept does
        save_tensors(self._client_file(client, round), flatten(kept))
        if client in self._unsaved and self._unsaved[client] != round:
            self._client_file(client, self._unsaved[client]).unlink()  # no checkpoint ever named it
        self._unsaved[client] = round

    def load_kept(self, client: int) -> PartTensors:
        """What a client kept, empty if it never did."""
        version = self._unsaved.get(client, self._versions.get(client))
        return {} if version is None else unflatten(load_tensors(self._client_file(client, version)))

    def checkpoint(self, state: ServerState) -> None:
        """Commit the state after a round."""
        self._settle()
        self._obsolete = [self._client_file(c, self._versions[c]) for c in self._unsaved if c in self._versions]
        self._versions |= self._unsaved
        self._unsaved = {}
        versions = torch.tensor(sorted(self._versions.items()), dtype=torch.int64).reshape(-1, 2)
        save_tensors(self.path / "checkpoint.safetensors", {**state.to_tensors(), _CLIENTS: versions})
        current = {self._client_file(c, v) for c, v in self._versions.items()} if self._obsolete else set()
        for file in self._obsolete:
            if file not in current:
                file.unlink(missing_ok=True)

    def finish(self, state: ServerState, summary: dict[str, Any]) -> None:
        """Write the result; ``summary.json`` last, so that its presence means the run is whole."""
        self._settle()
        save_tensors(self.path / "model.safetensors", state.model)
        save_tensors(self.path / "server.safetensors", state.to_tensors())
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    # -- reading ----------------------------------------------------------------------------------------------
    def metrics(self) -> list[dict[str, Any]]:
        """Every complete record, in order; a line cut short by a crash is passed over."""
        return read_lines(self.path / "metrics.jsonl")

    def summary(self) -> dict[str, Any] | None:
        """The result, or None while the run is not finished.

        Raises:
            RunError: The file is damaged.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if missing := [name for name in _RESULT if name not in summary]:
                raise ValueError(f"{missing[0]} is missing")
        except (ValueError, TypeError) as error:  # JSON's and Unicode's errors are ValueErrors; a number has no names
            raise RunError(f"{path} is damaged ({error}); delete it and resume the run, which writes it anew") from None
        return summary

    def model(self) -> Tensors:
        """The final model."""
        return load_tensors(self.path / "model.safetensors")

    # -- inside -----------------------------------------------------------------------------------------------
    def _client_file(self, client: int, version: int) -> Path:
        return self.path / "clients" / f"{client}.round{version}.safetensors"

    def _settle(self) -> None:
        settle(self.path / "metrics.jsonl")
        settle(self.insight.lines)

    def _cut_metrics(self, rounds: int) -> None:
        write_lines(self.path / "metrics.jsonl", [record for record in self.metrics() if record["round"] <= rounds])
        self.insight.cut(rounds)

    def _acquire(self) -> None:
        try:
            import fcntl
        except ImportError:  # no advisory locks on this system
            return
        try:
            self._lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise _InUseError(f"{self.path} is being written by another process; wait for it or stop it") from None
        except OSError:  # a file system without locks
            self.close()
