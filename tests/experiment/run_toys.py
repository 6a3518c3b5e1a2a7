"""Short runs, and what makes two of them the same."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import torch

from fedfa.experiment.config import Config
from fedfa.experiment.files import load_tensors, save_tensors
from fedfa.learning.tensors import Tensors

STATEFUL = str(Path(__file__).with_name("stateful_method.py"))
TIMES = {"train_seconds", "cpu_seconds", "samples_per_second"}


def small(expression: str = "fedfa", **more: Any) -> Config:
    """Four clients of six a round, a small network; takes milliseconds on the blobs."""
    base = {
        "rounds": 4,
        "device": "cpu",
        "data": {"clients": 6, "partition": "shards:2"},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "algorithm": {"name": expression},
        "cohort": {"clients": 4},
        "local": {"epochs": 2, "batch_size": 16, "lr": 0.1},
    }
    return Config.resolve(base, more)


def forget_digests(directory: Path) -> None:
    """Make a run directory one of an earlier release, whose files have no digests: tests may change them."""
    config = directory / "config.toml"
    config.write_text(config.read_text().partition("\n")[2])
    for name in ("origin.json", "preprocessing.json", "summary.json"):
        if (file := directory / name).exists():
            content = json.loads(file.read_text())
            file.write_text(json.dumps({key: content[key] for key in content if key not in ("digest", "record")}))
    for file in directory.glob("checkpoint*.safetensors"):
        save_tensors(file, load_tensors(file))


def timeless(directory: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without the times."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def client_states(directory: Path) -> dict[str, Tensors]:
    """The stored client state by file."""
    return {file.name: load_tensors(file) for file in sorted((directory / "clients").glob("*.safetensors"))}


def config_but_engine(directory: Path) -> dict[str, Any]:
    """The recorded config without the engine, which may differ."""
    recorded = tomllib.loads((directory / "config.toml").read_text())
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
    states_a, states_b = client_states(a), client_states(b)
    assert states_a.keys() == states_b.keys()
    assert all(equal_tensors(states_a[name], states_b[name]) for name in states_a)
    assert config_but_engine(a) == config_but_engine(b)
    summaries = [json.loads((directory / "summary.json").read_text()) for directory in (a, b)]
    for summary in summaries:
        # Times, and digests of files with times; the source may have been edited between two runs.
        for key in ("seconds", "cpu_seconds", "commit", "record", "digest"):
            del summary[key]
    assert summaries[0] == summaries[1]
    for directory in (a, b):
        assert {file.name for file in directory.iterdir() if not file.name.startswith("best.round")} <= FILES, (
            "something was left behind"
        )


FILES = {
    ".lock", "checkpoint.safetensors", "clients", "config.toml", "metrics.jsonl", "model.safetensors", "origin.json",
    "preprocessing.json", "server.safetensors", "split.json", "summary.json",
}  # fmt: skip
