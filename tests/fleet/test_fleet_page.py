"""docs/fleet.md shows the recorded measurements, and the study is declared completely."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import channel_cost, clock_study
from fedfa.experiment.config import preset_layer
from fedfa.fleet.devices import build_fleet

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")


def shown(mark: str) -> str:
    """The table after a comment."""
    (found,) = re.findall(rf"<!-- {mark} -->\n((?:\|.*\n)+)", PAGE)
    return str(found).strip()


def test_the_cost_of_codecs_is_the_recorded_one() -> None:
    recorded = json.loads((ROOT / channel_cost.FILE).read_text(encoding="utf-8"))
    assert shown("benchmarks.channel_cost") == channel_cost.table(recorded)
    assert f"took {recorded['training_seconds']:.1f} seconds" in PAGE.replace("\n", " ")
    assert {row["codec"] for row in recorded["rows"]} >= set(channel_cost.NAMES)


def test_the_bytes_on_the_wire_are_the_recorded_ones() -> None:
    recorded = json.loads((ROOT / "results" / "channel" / "wire.json").read_text(encoding="utf-8"))
    messages = recorded["sites"] * recorded["rounds"]
    for row in recorded["rows"]:
        framing = (row["wire"] - row["simulated"]) / messages / 1000
        assert f"| {row['direction']} | {row['simulated']:,} | {row['wire']:,} | {framing:.0f} kB |" in PAGE


@pytest.mark.parametrize(("network", "rounds"), re.findall(r"<!-- benchmarks.clock_study (\w+) (\d+) -->", PAGE))
def test_the_table_of_the_study_is_the_recorded_one(network: str, rounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert shown(f"benchmarks.clock_study {network} {rounds}") == clock_study.table(network, int(rounds))


def test_the_study_is_the_declared_grid() -> None:
    """Three methods, four policies, three channels, both networks: each cell a complete config of its own."""
    assert len(clock_study.places()) == 36
    assert len(clock_study.places(["float32/*/fedfa"])) == 4
    configs = {place.name: place.config("cnn", 200, 1) for place in clock_study.places()}
    assert len({config.to_toml() for config in configs.values()}) == 36
    for name, config in configs.items():
        channel, policy, method = name.split("/")
        assert (config.data.clients, config.model.name, config.algorithm.name) == (100, "cnn-fmnist", method)
        assert (config.fleet.late == "partial") == (policy == "partial")
        assert config.channel.up == channel
        assert len(build_fleet(config.fleet, 100)) == 100
    assert clock_study.places()[0].config("mlp", 200, 1).model.name == "mlp"


@pytest.mark.parametrize("policy", clock_study.DECLARED["policies"])
def test_the_presets_have_the_policies_of_the_study(policy: str) -> None:
    preset = preset_layer("fmnist-c2-phones" + ("" if policy == "wait" else f"-{policy}"))
    assert preset["fleet"] == {"devices": "phones", **clock_study.DECLARED["policies"][policy]["fleet"]}
    assert preset["data"] == clock_study.DECLARED["config"]["data"]
