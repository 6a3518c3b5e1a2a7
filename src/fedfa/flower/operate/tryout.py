"""A whole try-out on one machine: a federation is started, one run goes through it, and nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedfa.errors import RunError, SettingsError
from fedfa.flower.operate.federation import LocalFederation, Value
from fedfa.flower.operate.processes import Boxed, OperationError, last_words
from fedfa.flower.settings import FEDERATION, FederationSettings
from fedfa.messages import validation_message
from fedfa.studies.folder import RunFolder
from fedfa.studies.settings import Settings, read_toml

SLACK = 120.0
"""Seconds beyond a round's own limits before a run counts as stuck: process starts and evaluation on a busy machine."""


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class TryOut:
    """What to run, and where."""

    app: Path
    """The app's folder."""
    out: Path
    """The run folder."""
    sites: int = 3
    tls: bool = True
    resume: bool = False
    run_config: Mapping[str, Value] = field(default_factory=dict)
    """Over what the app's own pyproject.toml says."""
    node_config: Mapping[str, Value] = field(default_factory=dict)
    """What every site is told besides its number."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """How the server waits for sites and trusts them, over what the app says: keys of :class:`FederationSettings`."""

    def run(
        self,
        say: Callable[[str], None] = _nothing,
        watch: Callable[[dict[str, Any]], None] = _nothing,
        begun: Callable[[int], None] = _nothing,
    ) -> dict[str, Any]:
        """Start the federation, run, clean up.

        Args:
            say: Called with a few words at each step.
            watch: Called with each round's record.
            begun: Called with the number of rounds when the run has begun.

        Returns:
            The run's summary.

        Raises:
            FedfaError: What failed, with the lines of the logs that tell of it.
        """
        folder = RunFolder(self.out.absolute())
        if not self.resume and any(
            (folder.path / name).exists() for name in ("checkpoint.safetensors", "summary.json")
        ):
            raise RunError(f"{self.out} holds a run already; go on with it by --resume, or choose another --out")
        rules = self._federation(folder.path)
        record = _Record(folder, self.resume)
        place = folder.path / "flower"
        with _alone(place), LocalFederation(place, self.tls) as federation:
            say("starting the SuperLink")
            federation.start_superlink()
            say(f"starting {self.sites} sites")
            federation.register(*range(self.sites))
            for site in range(self.sites):
                federation.start_site(site, self._site_config(site, folder.path))
            for site in range(self.sites):
                federation.wait_for_site(site)
            say("submitting the run")
            run = federation.submit(self.app, {**self.run_config, **_flat(rules)})
            self._follow(federation, run, rules, record, say, watch, begun)
        summary = folder.summary()
        if summary is None:
            raise OperationError(f"the run ended without a result\n{self._reasons(federation, run)}")
        return summary

    def _site_config(self, site: int, folder: Path) -> dict[str, Value]:
        state = str(folder / "flower" / "sites")
        return {"partition-id": site, "num-partitions": self.sites, "state-dir": state, **self.node_config}

    def _federation(self, folder: Path) -> FederationSettings:
        """The app's own rules, ours over them; what neither names is left to the server."""
        place = {"sites": self.sites, "run_folder": str(folder), "resume": self.resume}
        try:
            return FederationSettings.model_validate({**rules_of(self.app), **self.rules, **place})
        except ValidationError as error:
            raise SettingsError(validation_message(error, FederationSettings, FEDERATION)) from None

    def _follow(
        self,
        federation: LocalFederation,
        run: Boxed,
        rules: FederationSettings,
        record: _Record,
        say: Callable[[str], None],
        watch: Callable[[dict[str, Any]], None],
        begun: Callable[[int], None],
    ) -> None:
        """Hand on each round's record until the run has ended; it may be slow, but not stand still."""
        # At the worst every try of a round takes its whole time, and so does the evaluation after it.
        patience = (rules.attempts + 1) * (rules.round_seconds + rules.wait_seconds) + SLACK
        last = time.monotonic()
        lost = set[str]()
        while True:
            ended = run.exit_code is not None  # asked before looking: what was written until then is seen below
            if not record.begun and record.has_begun():
                begun(record.folder.settings().rounds)
            for line in record.news():
                watch(line)
                last = time.monotonic()
            if ended:
                return
            if federation.superlink.exit_code is not None:
                raise OperationError(
                    f"the SuperLink ended (exit code {federation.superlink.exit_code}) in the middle of the run; "
                    f"--resume goes on with it\n{last_words(federation.superlink)}"
                )
            for name, one in federation.processes.running.items():
                if name.startswith("site") and one.exit_code is not None and name not in lost:
                    lost.add(name)
                    say(f"{name} ended (exit code {one.exit_code}); the others go on. Its log: {one.log}")
            if len(lost) == self.sites:
                raise OperationError(f"every site ended\n{self._reasons(federation, run)}")
            if time.monotonic() - last > patience:
                raise OperationError(f"no round in {patience:.0f} s\n{self._reasons(federation, run)}")
            time.sleep(0.2)

    def _reasons(self, federation: LocalFederation, run: Boxed) -> str:
        """What the logs tell: the run's own, and those of sites that speak of errors."""
        sites = [one for name, one in federation.processes.running.items() if name.startswith("site")]
        telling = [one for one in sites if "Traceback" in one.output() or one.exit_code not in (None, 0)]
        return "\n".join(last_words(one) for one in [run, *telling[:1]])


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Nobody else tries something out here meanwhile: who starts deletes keys and database of who was there before.

    Raises:
        RunError: Somebody does.
    """
    import fcntl  # every system that has Flower's commands has it

    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = os.open(place / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise RunError(f"cannot write to {place}: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"another try-out is using {place}; wait for it, stop it, or choose another --out"
                ) from None
        yield
    finally:
        os.close(lock)


def as_run_config(settings: Settings) -> dict[str, Value]:
    """Settings in the keys of the built-in app, complete: whatever its own pyproject.toml says, this is what runs.

    Example:
        >>> as_run_config(Settings.preset("digits-c2", {"rounds": 2}))["rounds"]
        2
    """
    values = settings.to_dict()
    rounds, seed = values.pop("rounds"), values.pop("seed")
    assignments = []
    for section, value in values.items():
        keys = {f"{section}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {section: value}
        assignments += [f"{key}={_inline(one)}" for key, one in keys.items()]
    return {"preset": "", "algorithm": "", "rounds": rounds, "seed": seed, "settings": shlex.join(assignments)}


def _inline(value: Any) -> str:
    """A value as TOML in one line; JSON's texts, numbers and lists are TOML's too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def rules_of(app: Path) -> dict[str, Any]:
    """What an app's own configuration says about the federation.

    Raises:
        SettingsError: The folder holds no Flower app.
    """
    path = app / "pyproject.toml"
    if not path.exists():
        raise SettingsError(f"{app} holds no Flower app (no pyproject.toml); `fedfa flower new {app}` writes one")
    config = read_toml(path).get("tool", {}).get("flwr", {}).get("app", {}).get("config", {})
    rules: dict[str, Any] = config.get(FEDERATION, {})
    return rules


def _flat(rules: FederationSettings) -> dict[str, Value]:
    return {f"{FEDERATION}.{key}": value for key, value in rules.model_dump(exclude_unset=True).items()}


class _Record:
    """The run folder as seen by somebody who looks on while the server writes it."""

    def __init__(self, folder: RunFolder, resume: bool) -> None:
        self.folder, self.begun = folder, False
        self._config = folder.path / "config.toml"
        # A configuration may lie there of an attempt that failed before its first round; the new one replaces it.
        self._stale = None if resume else self._written()
        self._last = max((line["round"] for line in folder.metrics()), default=0) if resume else 0

    def has_begun(self) -> bool:
        """Whether the server has taken up the record."""
        written = self._written()
        self.begun = written is not None and written != self._stale
        return self.begun

    def news(self) -> list[dict[str, Any]]:
        """Lines that were not seen yet."""
        lines = [line for line in self.folder.metrics() if line["round"] > self._last] if self.begun else []
        self._last = max((line["round"] for line in lines), default=self._last)
        return lines

    def _written(self) -> tuple[int, int] | None:
        try:
            status = self._config.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino
