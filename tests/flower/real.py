"""What tests against real processes share: settings that train in moments, a federation of three sites, the record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedfa.flower import app_folder
from fedfa.flower.operate.federation import LocalFederation, Value
from fedfa.flower.operate.processes import Boxed, last_words
from fedfa.flower.operate.tryout import as_run_config
from fedfa.studies.files import load_tensors
from fedfa.studies.settings import Settings

LIMIT = 600.0
"""Seconds after which a run of a test has failed. On an idle machine none takes a tenth of it."""


def quick_settings(recipe: str, rounds: int, sites: int, *, data: str = "digits", **others: Any) -> Settings:
    """A data set over the sites, a small network, one epoch."""
    return Settings.resolve(
        {
            "rounds": rounds,
            "device": "cpu",
            "data": {"name": data, "clients": sites, "partition": "shards:4"},
            "model": {"name": "mlp", "options": {"hidden": [16]}},
            "cohort": {"clients": sites},
            "local": {"epochs": 1, "lr": 0.1, "batch_size": 32, **others},
            "algorithm": {"recipe": recipe},
        }
    )


def site_config(site: int, sites: int, data_dir: Path, state: Path, **others: Value) -> dict[str, Value]:
    """What a site's SuperNode is started with."""
    where: dict[str, Value] = {"data-dir": str(data_dir), "state-dir": str(state)}
    return {"partition-id": site, "num-partitions": sites, **where, **others}


def start(federation: LocalFederation, sites: int, data_dir: Path, state: Path) -> None:
    """SuperLink and sites, all of them let in."""
    federation.start_superlink()
    federation.register(*range(sites))
    for site in range(sites):
        federation.start_site(site, site_config(site, sites, data_dir, state))
    for site in range(sites):
        federation.wait_for_site(site)


def run_config(settings: Settings, out: Path, data_dir: Path, **rules: Value) -> dict[str, Value]:
    """The run config for the built-in app."""
    rules = {"sites": settings.data.clients or 0, "run_folder": str(out), "wait_seconds": 120.0, **rules}
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"dir": str(data_dir)})})
    return {**as_run_config(settings), **{f"federation.{key}": value for key, value in rules.items()}}


def submit(
    federation: LocalFederation, settings: Settings, out: Path, data_dir: Path, app: Path | None = None, **rules: Value
) -> Boxed:
    """Submit a run."""
    return federation.submit(app or app_folder(), run_config(settings, out, data_dir, **rules))


def finish(run: Boxed, out: Path) -> Mapping[str, Any]:
    """Wait for the end of a run; its summary."""
    assert run.wait(LIMIT) == 0, last_words(run)
    assert (out / "summary.json").exists(), last_words(run, 40)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def metrics(out: Path) -> list[dict[str, Any]]:
    """The rounds that are recorded."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def until(true: Callable[[], object], what: str, run: Boxed, seconds: float = LIMIT) -> None:
    """Wait for something to happen in a run."""
    deadline = time.monotonic() + seconds
    while not true():
        assert run.exit_code is None, f"the run ended before {what}\n{last_words(run, 40)}"
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s\n{last_words(run, 40)}"
        time.sleep(0.05)


def assert_same_tensors(left: Path, right: Path) -> None:
    """Bit for bit."""
    first, second = load_tensors(left), load_tensors(right)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different
