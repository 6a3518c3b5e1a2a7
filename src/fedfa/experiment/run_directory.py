"""The run directory: the record of a run, and everything needed to continue it.

====================  =============================================================================================
``config.toml``       the config, complete
``origin.json``       what the config does not fix: fingerprints of data, network and method files
``preprocessing.json``  how raw inputs become what the network reads; the names of the classes
``split.json``        samples by client and class, where the data were given in Python
``metrics.jsonl``     one object per round
``summary.json``      the result, once the run is finished
``checkpoint.safetensors``  the server's state after the last saved round (``checkpoint.1.safetensors`` …: older ones,
                      where they are kept)
``clients/``          client state, one file per client and version
``best.round5.safetensors``  the server's state with the best validation so far, where the best round is chosen
``diagnostics.jsonl``, ``diagnostics/``  measurements and stored features (see :mod:`fedfa.diagnostics`)
``model.safetensors``, ``server.safetensors``  the final model; the final state of the server (anchors …)
====================  =============================================================================================

A checkpoint is the commit point. Clients' files are written before it under new names and deleted after it, and the
metrics (and diagnostics) are cut back to it on resume, so a run that was killed at any moment continues from a
consistent state. Every file carries a digest of itself, or the checkpoint and the summary carry one of it: what was
changed since is refused, not continued from. Directories of earlier releases have no digests and stay readable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
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
    check_marks,
    digest_of,
    load_tensors,
    marks_of,
    read_json,
    read_lines,
    read_notes,
    save_tensors,
    settle,
    write_atomically,
    write_json,
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
_RECORD = "record"
"""Name of the note of a checkpoint, and of the value in a summary, that says what the record was: length and digest of
each file of JSON lines."""
_CONFIG_DIGEST = "# digest of what follows: "
_RESULT = ("final_accuracy", "best_accuracy", "last10_accuracy", "rounds")
"""What every summary has."""


class _InUseError(RunError):
    """Another process holds the lock."""


class RunDirectory:
    """Reads and writes one run directory; holds a lock on it while a run writes.

    Args:
        path: The directory.
        checkpoints: How many checkpoints to keep; with more than one, :meth:`roll_back` can return to an earlier one.
    """

    def __init__(self, path: Path, checkpoints: int = 1) -> None:
        self.path, self._checkpoints = path, checkpoints
        self.diagnostics = DiagnosticsRecords(path)
        self._versions: dict[int, int] = {}
        self._unsaved: dict[int, int] = {}
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
        self._write_config(config)

    def check_writable(self, *, overwrite: bool) -> None:
        """Refuse a directory that holds a run, unless it may be replaced.

        Raises:
            RunError: There is a run already.
        """
        if self.holds_run() and not overwrite:
            raise RunError(
                f"{self.path} holds a run already; choose another directory, continue it with --resume (in Python "
                "resume=True), or in Python replace it with overwrite=True"
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
            self._prune()
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
        try:
            self._versions = {int(client): int(version) for client, version in tensors.pop(_CLIENTS).tolist()}
            state = _with_current_names(ServerState.from_tensors(tensors))
        except (KeyError, ValueError, TypeError) as error:
            raise RunError(f"{checkpoint} is damaged ({type(error).__name__}: {error}); put back a copy") from None
        if (marks := read_notes(checkpoint).get(_RECORD)) is not None:
            check_marks(self.path, marks)
        return state

    def roll_back(self) -> int | None:
        """Return to the checkpoint before the last one: its round, or None if there is no earlier one."""
        if not self._older(1).exists():
            return None
        self._acquire()
        try:
            for number in range(1, self._checkpoints):
                if self._older(number).exists():
                    self._older(number).replace(self._older(number - 1))
        finally:
            self.close()
        state = self.saved()
        return None if state is None else state.round

    def config(self) -> Config:
        """The config the run was started with.

        Raises:
            RunError: There is no run, or the file was changed.
        """
        path = self.path / "config.toml"
        if not path.exists():
            reason = "no config.toml" if self.path.is_dir() else "there is no such directory"
            raise RunError(f"{self.path} holds no run ({reason})")
        self.check_config()
        recorded = read_toml(path)
        # A record is complete. Before there was a choice, the size of a cohort was rounded to the nearest number.
        if isinstance(cohort := recorded.setdefault("cohort", {}), dict):
            cohort.setdefault("rounding", "nearest")
        return Config.resolve(recorded)

    def check_config(self) -> None:
        """Refuse a config that was changed after the run was started; one of an earlier release has no digest.

        Raises:
            RunError: It was changed.
        """
        path = self.path / "config.toml"
        first, _, rest = path.read_bytes().partition(b"\n")
        marked = first.startswith(_CONFIG_DIGEST.encode())
        checkpoint = self._older(0)
        expected = marked or (checkpoint.exists() and _RECORD in read_notes(checkpoint))
        if expected and first != (_CONFIG_DIGEST + digest_of(rest)).encode():
            raise RunError(
                f"{path} was changed after the run was started; restore it, or start another run with this file: "
                f"fedfa run {path} --out ANOTHER"
            )

    def _write_config(self, config: Config) -> None:
        text = config.to_toml()
        write_atomically(self.path / "config.toml", f"{_CONFIG_DIGEST}{digest_of(text)}\n{text}")

    def origin(self) -> dict[str, str]:
        """Fingerprints of what the run depends on besides its config; empty before they are recorded."""
        path = self.path / "origin.json"
        return read_json(path) if path.exists() else {}

    def check_origin(self, origin: dict[str, str]) -> None:
        """Record fingerprints of what the run depends on besides its config; on resume, refuse others."""
        path = self.path / "origin.json"
        if not path.exists():
            write_json(path, origin)
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
        self._write_config(config)

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
        self._versions |= self._unsaved
        self._unsaved = {}
        versions = torch.tensor(sorted(self._versions.items()), dtype=torch.int64).reshape(-1, 2)
        self._keep_older()
        notes = {_RECORD: json.dumps(self._marks())}
        save_tensors(self._older(0), {**state.to_tensors(), _CLIENTS: versions}, notes)
        self._prune()
        self._prune_best()

    def _keep_older(self) -> None:
        """Move older checkpoints one place on; at any moment the last one is in its place."""
        if self._checkpoints == 1 or not self._older(0).exists():
            return
        for number in range(self._checkpoints - 1, 1, -1):
            if self._older(number - 1).exists():
                self._older(number - 1).replace(self._older(number))
        self._older(1).unlink(missing_ok=True)
        shutil.copy2(self._older(0), self._older(1))

    def _prune(self) -> None:
        """Delete client state that no checkpoint names."""
        named = dict.fromkeys(self._client_file(*entry) for entry in self._versions.items())
        for number in range(1, self._checkpoints):
            if self._older(number).exists():
                entries = load_tensors(self._older(number), only=_CLIENTS)[_CLIENTS].tolist()
                named |= dict.fromkeys(self._client_file(client, version) for client, version in entries)
        for file in (self.path / "clients").glob("*.safetensors"):
            if file not in named:
                file.unlink(missing_ok=True)

    def save_best(self, round: int, state: ServerState) -> None:
        """Store the state with the best validation so far, of this record; a checkpoint then commits it."""
        if not self._best_file(round).exists():
            save_tensors(self._best_file(round), state.to_tensors())

    def best_state(self, round: int) -> ServerState:
        """The state that :meth:`save_best` stored for this round.

        Raises:
            RunError: It is not there.
        """
        path = self._best_file(round)
        if not path.exists():
            raise RunError(
                f"{path} is missing: the model of the best validation, which is to be tested; put back a copy"
            )
        return _with_current_names(ServerState.from_tensors(load_tensors(path)))

    def _best_file(self, round: int) -> Path:
        return self.path / f"best.round{round}.safetensors"

    def _prune_best(self) -> None:
        """Delete best states that no kept checkpoint can need: they improve from round to round."""
        files = sorted(self.path.glob("best.round*.safetensors"), key=lambda file: int(file.name.split(".")[1][5:]))
        for file in files[: -self._checkpoints]:
            file.unlink(missing_ok=True)

    def write_preprocessing(self, preprocessing: Preprocessing) -> None:
        """Store how raw inputs become what the network reads."""
        write_json(self.path / "preprocessing.json", preprocessing.to_dict())

    def write_split(self, split: Mapping[str, Any]) -> None:
        """Store how many samples of each class the clients hold."""
        write_json(self.path / "split.json", split)

    def split(self) -> dict[str, Any] | None:
        """The stored split; None where there is none, as for data that can be loaded again."""
        file = self.path / "split.json"
        return read_json(file) if file.exists() else None

    def write_model(self, state: ServerState) -> None:
        """Store the model and the server state as they are now."""
        save_tensors(self.path / "model.safetensors", state.model)
        save_tensors(self.path / "server.safetensors", state.to_tensors())

    def finish(self, state: ServerState, summary: dict[str, Any]) -> None:
        """Write the result; ``summary.json`` last, so that its presence means that the run is complete."""
        self._settle()
        self.write_model(state)
        write_json(self.path / "summary.json", {**summary, _RECORD: self._marks()})

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
            summary = _current_names(read_json(path))
            if missing := [name for name in _RESULT if name not in summary]:
                raise RunError(f"{path} is damaged ({missing[0]} is missing); put back a copy")
        except RunError as error:
            raise RunError(f"{error}, or delete it and resume the run, which writes it anew") from None
        check_marks(self.path, summary.pop(_RECORD, {}))
        return summary

    def preprocessing(self) -> Preprocessing | None:
        """How raw inputs become what the network reads; None in directories of releases before 0.2."""
        path = self.path / "preprocessing.json"
        return Preprocessing.from_dict(read_json(path)) if path.exists() else None

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

    def _older(self, number: int) -> Path:
        """The last checkpoint but this many."""
        return self.path / (f"checkpoint.{number}.safetensors" if number else "checkpoint.safetensors")

    def _marks(self) -> dict[str, str]:
        """Length and digest of each file of JSON lines as it is now."""
        return marks_of([self.path / "metrics.jsonl", self.diagnostics.lines])

    def _settle(self) -> None:
        settle(self.path / "metrics.jsonl")
        settle(self.diagnostics.lines)

    def _cut_metrics(self, rounds: int) -> None:
        write_lines(self.path / "metrics.jsonl", [record for record in self.metrics() if record["round"] <= rounds])
        self.diagnostics.cut(rounds)

    def _delete_run(self) -> None:
        for file in [
            *(self.path / name for name in _FILES),
            *self.path.glob("checkpoint.*.safetensors"),
            *self.path.glob("best.*"),
        ]:
            file.unlink(missing_ok=True)
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
    renamed = {"survey": "final_pass", "accuracy_before_survey": "accuracy_before_final_pass"}
    return {renamed.get(name, name): value for name, value in record.items()}


def _with_current_names(state: ServerState) -> ServerState:
    """The state with the components' names of today."""
    return replace(state, components={current_name(name): own for name, own in state.components.items()})
