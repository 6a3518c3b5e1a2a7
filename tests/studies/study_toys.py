"""Short runs, and what makes two of them the same."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import torch

from fedfa.learning.tensors import Tensors
from fedfa.studies.files import load_tensors
from fedfa.studies.settings import Settings

STATEFUL = str(Path(__file__).with_name("stateful_method.py"))
TIMES = {"train_seconds", "cpu_seconds", "samples_per_second"}


def small(recipe: str = "fedfa", **more: Any) -> Settings:
    """Four clients of six a round, a small network; takes milliseconds on the blobs."""
    base = {
        "rounds": 4,
        "device": "cpu",
        "data": {"clients": 6, "partition": "shards:2"},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "algorithm": {"recipe": recipe},
        "cohort": {"clients": 4},
        "local": {"epochs": 2, "batch_size": 16, "lr": 0.1},
    }
    return Settings.resolve(base, more)


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without the times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def kept_by_clients(folder: Path) -> dict[str, Tensors]:
    """What the clients keep, by file."""
    return {file.name: load_tensors(file) for file in sorted((folder / "clients").glob("*.safetensors"))}


def settings_that_count(folder: Path) -> dict[str, Any]:
    """The recorded settings without those of the engine, which may differ."""
    recorded = tomllib.loads((folder / "config.toml").read_text())
    return {section: values for section, values in recorded.items() if section != "engine"}


def equal_tensors(a: Tensors, b: Tensors) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def assert_same_run(a: Path, b: Path) -> None:
    """Two finished runs are the same, bit for bit, times apart."""
    for name in ("model.safetensors", "server.safetensors", "checkpoint.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes() or equal_tensors(
            load_tensors(a / name), load_tensors(b / name)
        ), f"{name} differs"
    assert timeless(a) == timeless(b)
    kept_a, kept_b = kept_by_clients(a), kept_by_clients(b)
    assert kept_a.keys() == kept_b.keys()
    assert all(equal_tensors(kept_a[name], kept_b[name]) for name in kept_a)
    assert settings_that_count(a) == settings_that_count(b)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (a, b)]
    for summary in summaries:
        for key in ("seconds", "cpu_seconds", "commit"):  # the source may have been edited between two runs
            del summary[key]
    assert summaries[0] == summaries[1]
    for folder in (a, b):
        assert {file.name for file in folder.iterdir()} <= FILES, "something was left behind"


FILES = {"origin.json",
    ".lock", "checkpoint.safetensors", "clients", "config.toml", "metrics.jsonl", "model.safetensors",
    "server.safetensors", "summary.json",
}  # fmt: skip
