"""Helpers for tests with real processes: a quick config, a federation of sites, the run's record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedfa.experiment.config import Config
from fedfa.experiment.files import load_tensors
from fedfa.flower import app_folder
from fedfa.flower.operate.federation import LocalFederation, Value
from fedfa.flower.operate.local_deployment import as_run_config
from fedfa.flower.operate.processes import SupervisedProcess, log_excerpt

LIMIT = 600.0
"""Time limit of a test's run in seconds. On an idle machine none takes a tenth of it."""


def quick_settings(algorithm: str, rounds: int, sites: int, *, data: str = "digits", **others: Any) -> Config:
    """A data set over the sites, a small network, one epoch."""
    return Config.resolve(
        {
            "rounds": rounds,
            "device": "cpu",
            "data": {"name": data, "clients": sites, "partition": "shards:4"},
            "model": {"name": "mlp", "options": {"hidden": [16]}},
            "cohort": {"clients": sites},
            "local": {"epochs": 1, "lr": 0.1, "batch_size": 32, **others},
            "algorithm": {"name": algorithm},
        }
    )


def site_config(site: int, sites: int, data_dir: Path, state: Path, **others: Value) -> dict[str, Value]:
    """Node config of a site."""
    where: dict[str, Value] = {"data-dir": str(data_dir), "state-dir": str(state)}
    return {"partition-id": site, "num-partitions": sites, **where, **others}


def start(federation: LocalFederation, sites: int, data_dir: Path, state: Path) -> None:
    """Start SuperLink and sites, and wait until all are admitted."""
    federation.start_superlink()
    federation.register(*range(sites))
    for site in range(sites):
        federation.start_site(site, site_config(site, sites, data_dir, state))
    for site in range(sites):
        federation.wait_for_site(site)


def run_config(config: Config, out: Path, data_dir: Path, **rules: Value) -> dict[str, Value]:
    """The run config for the built-in app."""
    rules = {"sites": config.data.clients or 0, "run_folder": str(out), "wait_seconds": 120.0, **rules}
    config = config.model_copy(update={"data": config.data.model_copy(update={"dir": str(data_dir)})})
    return {**as_run_config(config), **{f"federation.{key}": value for key, value in rules.items()}}


def submit(
    federation: LocalFederation, config: Config, out: Path, data_dir: Path, app: Path | None = None, **rules: Value
) -> SupervisedProcess:
    """Submit a run."""
    return federation.submit(app or app_folder(), run_config(config, out, data_dir, **rules))


def finish(run: SupervisedProcess, out: Path) -> Mapping[str, Any]:
    """Wait for the end of a run; return its summary."""
    assert run.wait(LIMIT) == 0, log_excerpt(run)
    assert (out / "summary.json").exists(), log_excerpt(run, 40)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def metrics(out: Path) -> list[dict[str, Any]]:
    """Recorded rounds."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def until(true: Callable[[], object], what: str, run: SupervisedProcess, seconds: float = LIMIT) -> None:
    """Wait for a condition during a run."""
    deadline = time.monotonic() + seconds
    while not true():
        assert run.exit_code is None, f"the run ended before {what}\n{log_excerpt(run, 40)}"
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s\n{log_excerpt(run, 40)}"
        time.sleep(0.05)


def until_joined(
    federation: LocalFederation,
    site: int,
    config: dict[str, Value],
    restarted: Callable[[LocalFederation, int, dict[str, Value]], bool],
) -> None:
    """Wait until a site is connected; one that was killed is started again."""
    deadline = time.monotonic() + LIMIT
    while not restarted(federation, site, config):
        assert time.monotonic() < deadline, f"site {site} was not admitted in {LIMIT:.0f} s"
        time.sleep(0.5)


def settle(files: Callable[[], list[Path]], seconds: float) -> None:
    """Wait until files have not changed for some seconds."""
    deadline = time.monotonic() + LIMIT
    before, since = None, time.monotonic()
    while time.monotonic() - since < seconds:
        assert time.monotonic() < deadline, "the files keep changing"
        now = [(file.name, file.stat().st_size) for file in files()]
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.2)


def assert_same_tensors(left: Path, right: Path) -> None:
    """Compare two files of tensors bit for bit."""
    first, second = load_tensors(left), load_tensors(right)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different
