"""The run directory: the record of a run, and everything needed to continue it.

====================  =============================================================================================
``config.toml``       the config, complete
``origin.json``       what the config does not fix: fingerprints of data, network and method files
``preprocessing.json``  how raw inputs become what the network reads; the names of the classes
``metrics.jsonl``     one object per round
``summary.json``      the result, once the run is finished
``checkpoint.safetensors``  the server's state after the last saved round
``clients/``          client state, one file per client and version
``diagnostics.jsonl``, ``diagnostics/``  measurements and stored features (see :mod:`fedfa.diagnostics`)
``model.safetensors``, ``server.safetensors``  the final model; the final state of the server (anchors …)
====================  =============================================================================================

A checkpoint is the commit point. Clients' files are written before it under new names and deleted after it, and the
metrics (and diagnostics) are cut back to it on resume, so a run that was killed at any moment continues from a
consistent state.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fedfa.algorithms.registry import current_name
from fedfa.data.preprocessing import Preprocessing
from fedfa.diagnostics.records import DiagnosticsRecords
from fedfa.errors import RunError
from fedfa.experiment.config import Config, read_toml
from fedfa.experiment.files import (
    append_line,
    load_tensors,
    read_lines,
    save_tensors,
    settle,
    write_atomically,
    write_lines,
)
from fedfa.learning.round import ServerState
from fedfa.learning.tensors import ComponentTensors, Tensors, flatten, unflatten

_CLIENTS = "kept_by_clients"
"""Name in the checkpoint of the versions of the clients' files; as in the first release."""
_FILES = (
    "config.toml", "origin.json", "preprocessing.json", "metrics.jsonl", "summary.json", "checkpoint.safetensors",
    "model.safetensors", "server.safetensors", "diagnostics.jsonl", "insight.jsonl",
)  # fmt: skip
_RESULT = ("final_accuracy", "best_accuracy", "last10_accuracy", "rounds")
"""What every summary has."""


class _InUseError(RunError):
    """Another process holds the lock."""


class RunDirectory:
    """Reads and writes one run directory; holds a lock on it while a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.diagnostics = DiagnosticsRecords(path)
        self._versions: dict[int, int] = {}
        self._unsaved: dict[int, int] = {}
        self._obsolete: list[Path] = []
        self._lock: FileLock | None = None
        self.client_states = StoredClientStates(self)
        """Client state in this directory."""

    # -- opening ----------------------------------------------------------------------------------------------
    def create(self, config: Config, *, overwrite: bool = False) -> None:
        """Start a new record. A run that failed before its first round was saved is replaced: nothing is lost.

        Args:
            config: The config of the run.
            overwrite: Delete a run that is here.

        Raises:
            RunError: There is a run already, or the directory cannot be written.
        """
        try:
            (self.path / "clients").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from None
        self._acquire()
        self.check_writable(overwrite=overwrite)
        if self.holds_run():
            self._delete_run()
        self._cut_metrics(0)
        (self.path / "origin.json").unlink(missing_ok=True)
        write_atomically(self.path / "config.toml", config.to_toml())

    def check_writable(self, *, overwrite: bool) -> None:
        """Refuse a directory that holds a run, unless it may be replaced.

        Raises:
            RunError: There is a run already.
        """
        if self.holds_run() and not overwrite:
            raise RunError(
                f"{self.path} holds a run already; continue it with --resume (fedfa.run: resume=True), replace it with "
                "overwrite=True, or choose another directory"
            )

    def take_over(self, other: Path, *, overwrite: bool) -> None:
        """Move the run of another directory here, in place of the one that is here."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from None
        self._acquire()
        try:
            self.check_writable(overwrite=overwrite)
            self._delete_run()
            (self.path / "clients").rmdir()
            for file in other.iterdir():
                if file.name != ".lock":
                    file.replace(self.path / file.name)
        finally:
            self.close()

    def holds_run(self) -> bool:
        """Whether there is something to lose: a saved round, or a result."""
        return any((self.path / name).exists() for name in ("checkpoint.safetensors", "summary.json"))

    def reopen(self) -> ServerState | None:
        """Reopen the record: the state to continue from, or None if no round was saved yet."""
        self._acquire()
        for leftover in self.path.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        state = self.saved()
        if state is not None or self.summary() is None:
            current = {self._client_file(client, version) for client, version in self._versions.items()}
            for file in (self.path / "clients").glob("*.safetensors"):
                if file not in current:
                    file.unlink()
        if self.summary() is None:  # the record of a final pass comes after the last checkpoint and stays
            self._cut_metrics(0 if state is None else state.round)
        return state

    def saved(self) -> ServerState | None:
        """The state after the last saved round, None if there is none; :meth:`load_client_state` then belongs to it.

        Only reads: another process may be writing the run.
        """
        checkpoint = self.path / "checkpoint.safetensors"
        self._versions = {}
        if not checkpoint.exists():
            return None
        tensors = load_tensors(checkpoint)
        self._versions = {int(client): int(version) for client, version in tensors.pop(_CLIENTS).tolist()}
        return _with_current_names(ServerState.from_tensors(tensors))

    def config(self) -> Config:
        """The config the run was started with."""
        path = self.path / "config.toml"
        if not path.exists():
            reason = "no config.toml" if self.path.is_dir() else "there is no such directory"
            raise RunError(f"{self.path} holds no run ({reason})")
        recorded = read_toml(path)
        # A record is complete. Before there was a choice, the size of a cohort was rounded to the nearest number.
        recorded["cohort"] = {"rounding": "nearest", **recorded.get("cohort", {})}
        return Config.resolve(recorded)

    def origin(self) -> dict[str, str]:
        """Fingerprints of what the run depends on besides its config; empty before they are recorded."""
        path = self.path / "origin.json"
        recorded: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return recorded

    def check_origin(self, origin: dict[str, str]) -> None:
        """Record fingerprints of what the run depends on besides its config; on resume, refuse others."""
        path = self.path / "origin.json"
        if not path.exists():
            write_atomically(path, json.dumps(origin, indent=2) + "\n")
            return
        recorded = self.origin()
        if changed := [
            what for what in sorted(recorded.keys() | origin.keys()) if recorded.get(what) != origin.get(what)
        ]:
            raise RunError(
                f"{self.path} cannot continue: {', '.join(changed)} changed since it was started; restore what it was "
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
        except RunError:  # not writable: whoever tries gets the error
            return False
        self.close()
        return False

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- writing ----------------------------------------------------------------------------------------------
    def extend(self, config: Config, done: int) -> None:
        """Record a config with more rounds than are done; the result of the shorter run is void."""
        (self.path / "summary.json").unlink(missing_ok=True)  # first: with it, the run would count as finished
        self._cut_metrics(done)
        write_atomically(self.path / "config.toml", config.to_toml())

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add a round's record; it is safe from a power failure from the next checkpoint on."""
        append_line(self.path / "metrics.jsonl", record)

    def save_client_state(self, client: int, round: int, client_state: ComponentTensors) -> None:
        """Store the state of a client; valid from the next checkpoint on."""
        if not client_state and client not in self._versions and client not in self._unsaved:
            return  # a client that never had state needs no file; one that cleared its state does
        save_tensors(self._client_file(client, round), flatten(client_state))
        if client in self._unsaved and self._unsaved[client] != round:
            self._client_file(client, self._unsaved[client]).unlink()  # no checkpoint ever named it
        self._unsaved[client] = round

    def load_client_state(self, client: int) -> ComponentTensors:
        """The state of a client; empty if it has none."""
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

    def write_preprocessing(self, preprocessing: Preprocessing) -> None:
        """Store how raw inputs become what the network reads."""
        write_atomically(self.path / "preprocessing.json", json.dumps(preprocessing.to_dict(), indent=2) + "\n")

    def write_model(self, state: ServerState) -> None:
        """Store the model and the server state as they are now."""
        save_tensors(self.path / "model.safetensors", state.model)
        save_tensors(self.path / "server.safetensors", state.to_tensors())

    def finish(self, state: ServerState, summary: dict[str, Any]) -> None:
        """Write the result; ``summary.json`` last, so that its presence means that the run is complete."""
        self._settle()
        self.write_model(state)
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    # -- reading ----------------------------------------------------------------------------------------------
    def metrics(self) -> list[dict[str, Any]]:
        """Every complete record, in order; a line cut short by a crash is passed over."""
        return [_current_names(record) for record in read_lines(self.path / "metrics.jsonl")]

    def summary(self) -> dict[str, Any] | None:
        """The result, or None while the run is not finished.

        Raises:
            RunError: The file is damaged.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            summary = _current_names(json.loads(path.read_text(encoding="utf-8")))
            if missing := [name for name in _RESULT if name not in summary]:
                raise ValueError(f"{missing[0]} is missing")
        except (ValueError, TypeError) as error:  # JSON's and Unicode's errors are ValueErrors; a number has no names
            raise RunError(f"{path} is damaged ({error}); delete it and resume the run, which writes it anew") from None
        return summary

    def preprocessing(self) -> Preprocessing | None:
        """How raw inputs become what the network reads; None in directories of releases before 0.2."""
        path = self.path / "preprocessing.json"
        return Preprocessing.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def final_state(self) -> ServerState | None:
        """The server state at the end of the run; None while it is not finished."""
        path = self.path / "server.safetensors"
        return _with_current_names(ServerState.from_tensors(load_tensors(path))) if path.exists() else None

    def saved_clients(self) -> list[int]:
        """The clients that have a state in the last checkpoint."""
        return sorted(self._versions)

    def model(self) -> Tensors:
        """The final model."""
        return load_tensors(self.path / "model.safetensors")

    # -- inside -----------------------------------------------------------------------------------------------
    def _client_file(self, client: int, version: int) -> Path:
        return self.path / "clients" / f"{client}.round{version}.safetensors"

    def _settle(self) -> None:
        settle(self.path / "metrics.jsonl")
        settle(self.diagnostics.lines)

    def _cut_metrics(self, rounds: int) -> None:
        write_lines(self.path / "metrics.jsonl", [record for record in self.metrics() if record["round"] <= rounds])
        self.diagnostics.cut(rounds)

    def _delete_run(self) -> None:
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in ("clients", "diagnostics", "insight"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / "clients").mkdir()
        self.diagnostics = DiagnosticsRecords(self.path)

    def _acquire(self) -> None:
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise _InUseError(f"{self.path} is being written by another process; wait for it or stop it") from None
        except NotImplementedError:  # a file system without locks
            return
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from None
        self._lock = lock


class StoredClientStates:
    """Client states in a run directory; see :class:`~fedfa.learning.round.ClientStates`."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def load(self, client: int) -> ComponentTensors:
        """The state of a client; empty if it has none."""
        return self._directory.load_client_state(client)

    def save(self, client: int, round: int, state: ComponentTensors) -> None:
        """Store the state of a client after a round."""
        self._directory.save_client_state(client, round, state)

    def discard(self, round: int) -> None:
        """Nothing: a run that is interrupted continues from its last checkpoint, which names the states it needs."""


def _current_names(record: dict[str, Any]) -> dict[str, Any]:
    """A record or summary with today's names in place of those of releases before 0.2."""
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    renamed = {"survey": "final_pass", "accuracy_before_survey": "accuracy_before_final_pass"}
    return {renamed.get(name, name): value for name, value in record.items()}


def _with_current_names(state: ServerState) -> ServerState:
    """The state with the components' names of today."""
    return replace(state, components={current_name(name): own for name, own in state.components.items()})
