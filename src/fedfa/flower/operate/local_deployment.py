"""Local deployment: start a federation on this machine, execute one run, and stop every process."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedfa.errors import ConfigError, RunError
from fedfa.experiment.config import Config, read_toml
from fedfa.experiment.layers import flat
from fedfa.experiment.run_directory import RunDirectory
from fedfa.flower.config import FEDERATION, FederationConfig, RunConfig
from fedfa.flower.operate.federation import LocalFederation, Value
from fedfa.flower.operate.processes import OperationError, SupervisedProcess, log_excerpt

SUBMISSIONS = 5
"""How often a run is submitted, if the SuperLink is started again meanwhile."""
PENDING_SECONDS = 90.0
"""Seconds after which a run that has not started is remarked on."""
SLACK = 120.0
"""Seconds beyond a round's own limits before a run counts as stuck: process starts and evaluation on a busy machine."""


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class LocalDeployment:
    """One run of an app on this machine."""

    app: Path
    """Directory of the app."""
    out: Path
    """The run directory."""
    sites: int = 3
    tls: bool = True
    resume: bool = False
    run_config: Mapping[str, Value] = field(default_factory=dict)
    """Overrides of the run config in the app's pyproject.toml."""
    node_config: Mapping[str, Value] = field(default_factory=dict)
    """Node config of every site, besides its number."""
    federation: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the app's federation config: keys of :class:`FederationConfig`."""
    on_step: Callable[[str], None] = _ignore
    """Called with a short description of each step."""
    on_start: Callable[[int], None] = _ignore
    """Called with the number of rounds when the run has started."""
    on_round: Callable[[dict[str, Any]], None] = _ignore
    """Called with each round's record."""

    def run(self) -> dict[str, Any]:
        """Start the federation, execute the run, stop the federation.

        Returns:
            The run's summary.

        Raises:
            FedfaError: Something failed; the message quotes the logs.
        """
        path = self.out.absolute()
        if not self.resume and any((path / name).exists() for name in ("checkpoint.safetensors", "summary.json")):
            raise RunError(f"{self.out} already holds a run; continue it with --resume, or choose another --out")
        self._federation_config()  # a wrong one is refused before anything starts
        with _exclusive(path / "flower"), LocalFederation(path / "flower", self.tls) as federation:
            self.on_step("starting the SuperLink")
            federation.start_superlink()
            self.on_step(f"starting {self.sites} sites")
            federation.register(*range(self.sites))
            for site in range(self.sites):
                federation.start_site(site, self._site_config(site, path))
            for site in range(self.sites):
                federation.wait_for_site(site)
            return self.execute(federation)

    def _federation_config(self) -> FederationConfig:
        """Checked config; keys that neither the app nor this deployment sets are left to the server."""
        own = {"sites": self.sites, "run_folder": str(self.out.absolute()), "resume": self.resume}
        RunConfig({**flat(app_config_of(self.app)), **self.run_config}).check()
        return FederationConfig.parse({**app_config_of(self.app).get(FEDERATION, {}), **self.federation, **own})

    def execute(self, federation: LocalFederation) -> dict[str, Any]:
        """Execute the run in a federation whose sites have joined; see :meth:`run`."""
        config, directory = self._federation_config(), RunDirectory(self.out.absolute())
        record = _RunRecord(directory, self.resume)
        self.on_step("submitting the run")
        rules = {f"{FEDERATION}.{key}": value for key, value in config.model_dump(exclude_unset=True).items()}
        if "site_keys" not in config.model_fields_set:
            rules[f"{FEDERATION}.site_keys"] = federation.site_keys_file(self.sites)
        for _ in range(SUBMISSIONS):
            restarts = federation.superlink_restarts()
            process = federation.submit(self.app, {**self.run_config, **rules})
            self._follow(federation, process, config, record)
            if (summary := directory.summary()) is not None:
                return summary
            if federation.superlink_restarts() == restarts:
                break
            self.on_step("the SuperLink was started again; submitting the run again, from its last checkpoint")
            rules[f"{FEDERATION}.resume"] = True
            federation.wait_for_superlink()
        raise OperationError(f"the run ended without a result\n{self._logs(federation, process)}")

    def _site_config(self, site: int, directory: Path) -> dict[str, Value]:
        state = str(directory / "flower" / "sites")
        return {"partition-id": site, "num-partitions": self.sites, "state-dir": state, **self.node_config}

    def _follow(
        self, federation: LocalFederation, run: SupervisedProcess, config: FederationConfig, record: _RunRecord
    ) -> None:
        """Report each round until the run has ended; fail if it makes no progress."""
        # In the worst case every attempt at a round takes all its time, and so does the evaluation after it.
        patience = (config.attempts + 1) * (config.round_seconds + config.wait_seconds) + SLACK
        last = submitted = time.monotonic()
        explained = False
        lost = set[str]()
        while True:
            # Checked first: everything written before is read below. The server's app can outlive the stream of its
            # log, if only the SuperLink was started again.
            ended = run.exit_code is not None and not record.directory.in_use()
            if not record.started and not explained and time.monotonic() - submitted > PENDING_SECONDS:
                explained = True
                self.on_step(
                    f"the run is still pending after {PENDING_SECONDS:.0f} s: the SuperLink has not started its server "
                    f"process, or that waits for sites. Logs: {run.log}, {federation.superlink.log}"
                )
            if not record.started and record.check_started():
                self.on_start(record.directory.config().rounds)
            for line in record.new_rounds():
                self.on_round(line)
                last = time.monotonic()
            if ended:
                return
            if federation.superlink.exit_code is not None:
                raise OperationError(
                    f"the SuperLink ended (exit code {federation.superlink.exit_code}) during the run; continue it "
                    f"with --resume\n{log_excerpt(federation.superlink)}"
                )
            for process in _sites(federation):
                if process.exit_code is not None and process.name not in lost:
                    lost.add(process.name)
                    self.on_step(
                        f"{process.name} ended (exit code {process.exit_code}); the run continues with the others. "
                        f"Its log: {process.log}"
                    )
            if len(lost) == self.sites:
                raise OperationError(f"every site ended\n{self._logs(federation, run)}")
            if time.monotonic() - last > patience:
                raise OperationError(f"no round in {patience:.0f} s\n{self._logs(federation, run)}")
            time.sleep(0.2)

    def _logs(self, federation: LocalFederation, run: SupervisedProcess) -> str:
        """Excerpts of the run's log and of the first site's log that shows an error."""
        failed = [one for one in _sites(federation) if "Traceback" in one.output() or one.exit_code not in (None, 0)]
        return "\n".join(log_excerpt(process) for process in [run, *failed[:1]])


def _sites(federation: LocalFederation) -> list[SupervisedProcess]:
    return [process for name, process in federation.processes.running.items() if name.startswith("site")]


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock: starting a deployment deletes existing keys and the database.

    Raises:
        RunError: Another deployment holds the lock, or the directory cannot be written.
    """
    lock = FileLock(directory / ".lock")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise RunError(
            f"another local deployment is using {directory}; wait for it, stop it, or choose another --out"
        ) from None
    except NotImplementedError:  # a file system without locks
        pass
    except OSError as error:
        raise RunError(f"cannot write to {directory}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def as_run_config(settings: Config) -> dict[str, Value]:
    """Complete config in the keys of the built-in app, overriding everything in the app's pyproject.toml.

    Example:
        >>> as_run_config(Config.preset("digits-c2", {"rounds": 2}))["rounds"]
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
    """Value as one line of TOML; strings, numbers and lists have the same syntax in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def app_config_of(app: Path) -> dict[str, Any]:
    """Run config in an app's pyproject.toml.

    Raises:
        ConfigError: The directory holds no Flower app.
    """
    path = app / "pyproject.toml"
    if not path.exists():
        raise ConfigError(f"{app} holds no Flower app (no pyproject.toml); create one with `fedfa flower new {app}`")
    config: dict[str, Any] = read_toml(path).get("tool", {}).get("flwr", {}).get("app", {}).get("config", {})
    return config


class _RunRecord:
    """Reads the run directory while the server writes it."""

    def __init__(self, directory: RunDirectory, resume: bool) -> None:
        self.directory, self.started = directory, False
        self._config = directory.path / "config.toml"
        # A failed attempt may have left a config; the new run replaces it.
        self._stale = None if resume else self._written()
        self._last = max((line["round"] for line in directory.metrics()), default=0) if resume else 0

    def check_started(self) -> bool:
        """Check whether the server has opened the run directory."""
        written = self._written()
        self.started = written is not None and written != self._stale
        return self.started

    def new_rounds(self) -> list[dict[str, Any]]:
        """Records since the last call."""
        lines = [line for line in self.directory.metrics() if line["round"] > self._last] if self.started else []
        self._last = max((line["round"] for line in lines), default=self._last)
        return lines

    def _written(self) -> tuple[int, int] | None:
        try:
            status = self._config.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino
