"""Robust rules in rounds: over the model and every other contribution, with any engine, across a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedfa.algorithms.registry import methods
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ConfigError
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.learning.aggregate import Aggregate, WeightedSum
from fedfa.protection import rules
from fedfa.protection.robust import RobustRule
from tests.protection.small import experiment, one_round

RULES = ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centred-clipping"]


def test_without_a_rule_the_algorithm_has_no_further_component(blobs: DataSet) -> None:
    made = experiment(blobs, {}, "fedfa")
    assert [component.name for component in made.algorithm.components] == ["fedavg", "anchors", "calibration", "final"]
    with_rule = experiment(blobs, {"aggregation": {"rule": "median"}}, "fedfa")
    assert with_rule.algorithm.components[-1] == RobustRule(rule="median")


def test_the_server_moves_by_the_rules_centre_of_the_model_and_of_the_anchors(blobs: DataSet) -> None:
    made = experiment(blobs, {"aggregation": {"rule": "median"}}, "fedfa")
    state, statistics = one_round(made)
    for name, before in made.state.model.items():
        each = [result.contribution["fedavg/model"] for result in statistics.results]
        points = torch.stack([(entry.tensors[name].double() / entry.weight.double()).flatten() for entry in each])
        expected = (before.double() + rules.median(points).reshape(before.shape)).float()
        assert torch.allclose(state.model[name], expected, atol=1e-7)
    entries = [result.contribution["anchors/anchors"] for result in statistics.results]
    points = torch.stack([(one.tensors["anchors"].double() / one.weight.double()).flatten() for one in entries])
    anchors = state.components["anchors"]["anchors"]
    assert torch.allclose(anchors, rules.median(points).reshape(anchors.shape).float(), atol=1e-6)


def test_rows_with_their_own_weight_are_combined_over_their_holders() -> None:
    def client(rows: list[float], weights: list[float]) -> dict[str, WeightedSum]:
        values = torch.tensor(rows).unsqueeze(1)
        return {"a/b": WeightedSum.of({"x": values}, torch.tensor(weights).unsqueeze(1))}

    total = Aggregate(keep_each=True)
    for rows, weights in (([1, 5], [2, 0]), ([2, 7], [1, 1]), ([100, 8], [1, 3]), ([0, 9], [0, 1])):
        total.add(client([float(v) for v in rows], [float(w) for w in weights]))
    centre = RobustRule(rule="median")._centre("a/b", [one["a/b"] for one in total.each], 1, {})
    assert centre["x"].flatten().tolist() == [2.0, 8.0]


def test_buckets_are_averages_of_groups(blobs: DataSet) -> None:
    """One bucket of all clients is the weighted mean, whatever the rule."""
    plain, _ = one_round(experiment(blobs, {}))
    bucketed, _ = one_round(experiment(blobs, {"aggregation": {"rule": "krum", "bucket": 8}}))
    for name, value in plain.model.items():
        assert torch.allclose(bucketed.model[name], value, atol=1e-6)


@pytest.mark.parametrize("method", [name for name in methods() if name != "fedbn"])
def test_every_method_runs_under_a_rule_or_refuses_with_a_reason(method: str, blobs: DataSet) -> None:
    """FedBN is FedAvg on the tensors that travel, and this network normalises nothing."""
    settings = {"aggregation": {"rule": "trimmed-mean"}}
    if method in ("ccvr", "matching", "centralised"):
        with pytest.raises(AlgorithmError, match=r"aggregation.rule = 'trimmed-mean' cannot be used with '\w+': \w+"):
            experiment(blobs, settings, method)
        return
    made = experiment(blobs, settings, method, partition="shards:2")
    assert [record.train_loss is not None for record in made.rounds(2, progress=False)][:2] == [True, True]


def test_scaffold_with_weighted_clients_refuses_a_rule(blobs: DataSet) -> None:
    settings = {"aggregation": {"rule": "median"}, "algorithm": {"scaffold": {"weighting": "samples"}}}
    with pytest.raises(AlgorithmError, match="exact sums"):
        experiment(blobs, settings, "scaffold")


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.slow) for rule in RULES])
def test_the_number_of_workers_changes_no_bit(rule: str, blobs: DataSet) -> None:
    settings = {"aggregation": {"rule": rule, "bucket": 2}, "attack": {"kind": "alie", "share": 0.25}}
    ends = []
    for workers in (1, 2):
        made = experiment(blobs, settings, "fedfa", workers=workers)
        assert all(record.accuracy is not None for record in made.rounds(2, progress=False))
        ends.append(made.state.to_tensors())
    for name, value in ends[0].items():
        assert torch.equal(ends[-1][name], value), name


def test_what_the_rule_remembers_survives_a_resume(tmp_path: Path, data_dir: Path) -> None:
    layer = {
        "data": {"dir": str(data_dir), "offline": True}, "aggregation": {"rule": "centred-clipping"},
        "engine": {"workers": 1, "execution": "each"}, "local": {"epochs": 1},
    }  # fmt: skip
    longer = Config.preset("digits-c2", layer, {"rounds": 2})
    run(Config.preset("digits-c2", layer, {"rounds": 1}), tmp_path / "a")
    resumed = run(longer, tmp_path / "a", resume=True)
    whole = run(longer, tmp_path / "b")
    assert all(torch.equal(resumed.model[name], value) for name, value in whole.model.items())
    assert whole.metrics[-1]["accuracy"] == resumed.metrics[-1]["accuracy"]


def test_a_misspelt_rule_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"aggregation\.rule = 'trimed-mean'.*did you mean 'trimmed-mean'"):
        Config.resolve({"aggregation": {"rule": "trimed-mean"}})
