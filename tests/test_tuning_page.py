"""The table of tuned methods: made from the committed records, and these are what they claim to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import tuned_table
from benchmarks.tuned_table import METHODS, RECORDS, ROUNDS, SEEDS, TEST_ROUNDS, TRIALS
from fedfa.experiment.config import Config, read_toml
from fedfa.experiment.layers import flat
from fedfa.experiment.tuning import parse_parameter


def trials_of(method: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{method}-trials.json").read_text("utf-8"))
    return found


def test_the_page_shows_the_table_of_the_records() -> None:
    page = tuned_table.PAGE.read_text("utf-8")
    assert tuned_table.refresh(page, tuned_table.table()) == page, "run: python -m benchmarks.tuned_table"


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_same_budget(method: str) -> None:
    found = trials_of(method)
    assert sorted(one["trial"] for one in found["trials"]) == list(range(1, TRIALS + 1)), "failures included"
    assert found["rungs"] == [5, 16, ROUNDS]
    assert [sum(str(rung) in one["by_rung"] for one in found["trials"]) for rung in found["rungs"]] == [18, 6, 2]
    assert found["command"] == "fedfa " + " ".join(tuned_table.tune_command(method, f"runs/tuned/{method}"))
    ranges = [parse_parameter(text) for text in (tuned_table.RATE, METHODS[method])]
    for one in found["trials"]:
        assert [*one["values"]] == [each.key for each in ranges]
        assert all(each.low <= one["values"][each.key] <= each.high for each in ranges)
    best = tuned_table.winner(found)
    assert best["scores"] == [max(s for one in found["trials"] if one["rounds"] == ROUNDS for s in one["scores"])]


@pytest.mark.parametrize("method", METHODS)
def test_the_winner_was_tested_with_new_seeds(method: str) -> None:
    values = tuned_table.winner(trials_of(method))["values"]
    for seed in SEEDS:
        config = Config.resolve(read_toml(RECORDS / f"{method}-s{seed}" / "config.toml"))
        assert (config.seed, config.rounds, config.algorithm.name) == (seed, TEST_ROUNDS, method)
        recorded = flat(config.to_dict())
        assert {key: recorded[key] for key in values} == values
        assert recorded["data.validation"] == "clients:0.1"
    assert not set(SEEDS) & set(trials_of(method)["seeds"])
