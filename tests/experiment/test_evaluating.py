"""What a record says about its evaluation: metrics, whose model, on what, averaged over what; own distributions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

import fedfa
from fedfa.data import DataSet
from fedfa.errors import ConfigError, RunError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.record import accuracies, whose_accuracy
from fedfa.experiment.run import run
from fedfa.experiment.sweep import Cell
from fedfa.report.comparison_summary import SettingResults, as_markdown
from tests.experiment.run_toys import small, timeless
from tests.learning.test_personal_evaluation import network, two_domains


def macro(labels: np.ndarray, scores: np.ndarray) -> float:
    """A user's own metric."""
    return float(f1_score(labels, scores.argmax(-1), average="macro"))


def spread_over(experiment: Experiment, record: fedfa.RoundRecord, clients: range) -> list[float]:
    """Each client's own accuracy, by resampling by hand: the accuracy of each class, weighted by the client's share."""
    by_class = record["class_accuracy"]
    values = []
    for client in clients:
        labels = experiment.federation.client(client).labels.tolist()
        values.append(float(np.mean([by_class[label] for label in labels])))
    return values


def test_metrics_by_name_and_of_one_s_own_are_in_the_record(blobs: DataSet) -> None:
    data = blobs.split("shards:2", clients=6)
    experiment = Experiment("fedavg", data=data, model="mlp", cohort=3, metrics=["macro_f1", "confusion_matrix", macro])
    record = next(experiment.rounds(1))
    own = next(name for name in record.metrics if name.endswith(":macro"))
    assert record.metrics["macro_f1"] == pytest.approx(record.metrics[own])
    assert np.array(record.metrics["confusion_matrix"]).sum() == len(blobs.test)
    assert np.trace(record.metrics["confusion_matrix"]) == round(record["accuracy"] * len(blobs.test))
    assert record.evaluated["model"] == "global"
    assert record.evaluated["averages"]["macro_f1"] == "classes"
    assert experiment.config.evaluation.metrics == ("macro_f1", "confusion_matrix", own)


@pytest.mark.parametrize("workers", [1, 2])
def test_metrics_do_not_depend_on_the_number_of_workers(workers: int, blobs: DataSet, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"metrics": ["auroc", "calibration_error", "top:2"], "batch_size": 7}
    config = small("fedavg", evaluation=chosen, engine={"workers": workers}, rounds=2)
    run(config, tmp_path / "a", data=blobs)
    run(small("fedavg", evaluation=chosen, engine={"workers": 1}, rounds=2), tmp_path / "b", data=blobs)
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    assert set(timeless(tmp_path / "a")[0]["metrics"]) == {"auroc", "calibration_error", "top:2"}


def test_over_unequal_domains_every_average_is_labelled() -> None:
    data = two_domains().split("domains", clients=6)
    record = next(Experiment("fedavg", data=data, model=network, cohort=6, metrics=["macro_f1"]).rounds(1))
    assert record.accuracy == pytest.approx(sum(record.domain_accuracy.values()) / 2)
    averages = record.evaluated["averages"]
    assert (averages["accuracy"], averages["loss"]) == ("samples, domains", "samples")
    assert (averages["macro_f1"], averages["class_accuracy"]) == ("classes, domains", "samples")


def test_clients_models_are_marked_as_such(tmp_path: Path) -> None:
    data = two_domains()
    config = small("local", data={"partition": "domains"}, cohort={"clients": 6}, rounds=1)
    result = run(config, tmp_path / "run", data=data, model=network)
    evaluated = result.metrics[-1]["evaluated"]
    assert evaluated["model"] == "clients"
    assert evaluated["samples"] == "those of the client's domains"
    assert evaluated["averages"]["accuracy"] == "samples, clients, domains"
    assert result.summary["evaluated"] == {"model": "clients", "on": "test", "final": "test"}
    assert result.metrics[-1]["own_data"]["model"] == "clients"
    old = [{key: value for key, value in result.metrics[-1].items() if key != "evaluated"}]
    assert whose_accuracy(old) == {"model": "clients", "on": "test"}


def test_own_distributions_of_all_clients(blobs: DataSet) -> None:
    """The global model on each client's own classes: mean, worst tenth and standard deviation, by hand."""
    data = blobs.split("shards:2", clients=6)
    evaluation = {"evaluation": {"clients": "all"}}
    experiment = Experiment("fedavg", data=data, model="mlp", cohort=3, settings=evaluation)
    (record,) = experiment.rounds(1)
    values = spread_over(experiment, record, range(6))
    assert record.own_data["clients"] == 6
    assert record.own_data["mean"] == pytest.approx(np.mean(values))
    assert record.own_data["worst_decile"] == pytest.approx(min(values))
    assert record.own_data["spread"] == pytest.approx(np.std(values))
    assert record.own_data["model"] == "global"
    assert "own_data" not in next(Experiment("fedavg", data=data, model="mlp", cohort=3).rounds(1))


def test_local_models_do_well_on_their_own_classes(blobs: DataSet) -> None:
    """A client with two of four classes is right on at most half of all samples, but can be on all of its own."""
    data = blobs.split("shards:2", clients=6)
    local = fedfa.LocalTraining(epochs=5, batch_size=16, lr=0.1)
    *_, record = Experiment("local", data=data, model="mlp", cohort=6, local=local).rounds(2)
    assert record["accuracy"] < 0.7
    assert record.own_data["mean"] > 0.9


def test_the_best_is_never_below_the_final_accuracy() -> None:
    """The final pass counts as an evaluation: before, it was left out of the best."""
    found = accuracies([{"accuracy": 0.5}, {"accuracy": 0.4}, {"accuracy": 0.6, "final_pass": True}])
    assert found["best_accuracy"] == found["final_accuracy"] == 0.6
    assert found["last10_accuracy"] == pytest.approx(0.45)
    assert found["last10_count"] == 2
    assert "last10_count" not in accuracies([{"accuracy": 0.5}] * 10)


def test_a_metric_that_fails_is_reported_and_the_round_is_not_lost(blobs: DataSet) -> None:
    def broken(labels: np.ndarray, scores: np.ndarray) -> float:
        raise ZeroDivisionError("oh")

    data = blobs.split("shards:2", clients=6)
    experiment = Experiment("fedavg", data=data, model="mlp", cohort=3, metrics=[broken])
    with pytest.raises(RunError, match="metric 'own:broken': ZeroDivisionError: oh"):
        next(experiment.rounds(1))
    assert experiment.state.round == 0


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"metrics": ["macro_f2"]}, "did you mean 'macro_f1'"),
        ({"metrics": ["auroc", "auroc"]}, "named twice"),
        ({"monitor": "auroc"}, "evaluation.monitor = 'auroc'"),
        ({"patience": 3}, "evaluation.patience = 3 goes by validation samples"),
        ({"choose": "best"}, "set data.validation"),
    ],
)
def test_what_cannot_be_is_refused(evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small("fedavg", evaluation=evaluation)


def test_tables_say_whose_model_was_tested_on_what(blobs: DataSet, tmp_path: Path) -> None:
    """A table with a global model, clients' models and a validated run: each is marked, metrics name their averages."""
    chosen: dict[str, Any] = {"metrics": ["macro_f1"], "clients": "all"}
    cells = []
    for method in ("fedavg", "local"):
        config = small(method, evaluation=chosen, rounds=1)
        run(config, tmp_path / f"{method}-s1", data=blobs)
        cells.append(Cell(method, config, tmp_path / f"{method}-s1"))
    validated = small("fedprox", data={"validation": "server:0.2"}, rounds=1)
    run(validated, tmp_path / "fedprox-s1", data=blobs)
    cells.append(Cell("fedprox", validated, tmp_path / "fedprox-s1"))
    page = as_markdown([SettingResults(("blobs",), cells, {})])
    for line in ("| fedavg |", "| local † |", "| fedprox ‡ |", "macro_f1 (classes)", "own data: worst tenth"):
        assert line in page
    assert "† no global model" in page
    assert "‡ with validation samples" in page
    assert "clients' own |" in page
    assert re.search(r"^\| fedavg \| 1 \| [\d.]+ \| [\d.]+ \| [\d.]+ \[1\] \|", page, re.MULTILINE), "the mean of one"
