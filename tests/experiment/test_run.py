from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedfa
from fedfa.data import DataSet, Federation, Partition, Samples
from fedfa.errors import AlgorithmError, ClientError, ConfigError, DataError, ModelError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import load_tensors
from fedfa.experiment.run import run
from fedfa.learning.evaluate import Evaluation, mean_evaluation
from fedfa.learning.random import torch_stream
from tests.experiment.run_toys import STATEFUL, TIMES, assert_same_run, client_states, equal_tensors, small, timeless

METRICS = {
    "round", "accuracy", "loss", "class_accuracy", "domain_accuracy", "cohort", "train_seconds", "samples_per_second",
    "bytes_up", "bytes_down", "learning_rate",
}  # fmt: skip
SUMMARY = {
    "final_accuracy", "best_accuracy", "last10_accuracy", "rounds", "seconds", "algorithm", "seeds", "versions",
    "commit",
}  # fmt: skip


def batch_norm_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def convolution_network() -> nn.Module:
    """Enough weights per tensor that the order of a sum over them shows in its last bits."""
    return nn.Sequential(
        nn.Linear(6, 128), nn.Unflatten(1, (8, 4, 4)), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
    )


# -- repeatable -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", STATEFUL], ids=["fedavg", "fedfa", "stateful"])
def test_the_same_seed_twice_is_the_same_run(tmp_path: Path, blobs: DataSet, algorithm: str) -> None:
    run(small(algorithm), tmp_path / "a", data=blobs)
    torch.manual_seed(99)  # nothing depends on what went before in this process
    torch.rand(5)
    run(small(algorithm), tmp_path / "b", data=blobs)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_only_the_times_of_the_metrics_differ(tmp_path: Path, blobs: DataSet) -> None:
    a, b = (run(small(), tmp_path / name, data=blobs).metrics for name in "ab")
    for mine, other in zip(a, b, strict=True):
        assert {key for key in mine if mine[key] != other[key]} <= TIMES


def test_the_number_of_threads_does_not_matter(tmp_path: Path, blobs: DataSet) -> None:
    run(small(), tmp_path / "a", data=blobs)
    try:
        torch.set_num_threads(2)
        run(small(), tmp_path / "b", data=blobs)
        assert torch.get_num_threads() == 2, "the caller's setting was not put back"
    finally:
        torch.set_num_threads(1)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_another_seed_is_another_run_on_the_same_split(tmp_path: Path, blobs: DataSet) -> None:
    first, other = small(seed=1), small(seed=2)
    a, b = (run(config, tmp_path / str(config.seed), data=blobs) for config in (first, other))
    assert not equal_tensors(a.model, b.model)
    assert [r["cohort"] for r in a.metrics] != [r["cohort"] for r in b.metrics]
    splits = [Experiment.from_config(config, data=blobs).federation.partition for config in (first, other)]
    assert splits[0].order.tolist() == splits[1].order.tolist()


def test_another_data_seed_is_another_split_with_the_same_start_and_cohorts(tmp_path: Path, blobs: DataSet) -> None:
    first, other = small(), small(data={"seed": 2})
    experiments = [Experiment.from_config(config, data=blobs) for config in (first, other)]
    assert experiments[0].federation.partition.order.tolist() != experiments[1].federation.partition.order.tolist()
    start, other_start = (experiment.state for experiment in experiments)
    assert equal_tensors(start.model, other_start.model)
    assert equal_tensors(start.components["anchors"], other_start.components["anchors"])
    a, b = (run(config, tmp_path / str(config.data.seed), data=blobs) for config in (first, other))
    assert [r["cohort"] for r in a.metrics] == [r["cohort"] for r in b.metrics]
    assert not equal_tensors(a.model, b.model)


@pytest.mark.parametrize("algorithm", ["fedfa", STATEFUL], ids=["fedfa", "stateful"])
@pytest.mark.parametrize("network", [batch_norm_network, convolution_network])
def test_own_networks_resume_bit_by_bit(tmp_path: Path, blobs: DataSet, network: Any, algorithm: str) -> None:
    """Also where a method sums over weights whose memory layout the network or the disk has changed."""
    config = small(algorithm)
    run(config, tmp_path / "whole", data=blobs, model=network)

    def stop(record: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # stopped in the first round, before anything was saved; twice
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "stopped", data=blobs, model=network, resume=True, watch=stop)
    for rounds in range(2, 5):  # stopped after each further one

        def stop_at(record: Mapping[str, Any], last: int = rounds) -> None:
            if record["round"] == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "stopped", data=blobs, model=network, resume=True, watch=stop_at)
    run(config, tmp_path / "stopped", data=blobs, model=network, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


# -- the record -------------------------------------------------------------------------------------------------------
def test_the_record_has_every_field(tmp_path: Path, blobs: DataSet) -> None:
    config = small(local={"lr_decay": 0.5})
    result = run(config, tmp_path / "run", data=blobs)
    assert [record["round"] for record in result.metrics] == [1, 2, 3, 4]
    for number, record in enumerate(result.metrics):
        assert record.keys() >= METRICS
        assert 0 <= record["accuracy"] <= 1
        assert record["loss"] > 0
        assert len(record["class_accuracy"]) == 4
        assert record["domain_accuracy"] == {}
        assert len(record["cohort"]) == 4
        assert record["train_seconds"] > 0
        assert record["samples_per_second"] > 0
        assert record["learning_rate"] == 0.1 * 0.5**number
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().split("\n")
    assert lines.pop() == ""
    assert result.metrics == [json.loads(line) for line in lines]
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text()) == {
        **config.to_dict(),
        "data": {**config.to_dict()["data"], "name": "own"},
    }


def test_the_summary_says_what_is_in_the_metrics(tmp_path: Path, blobs: DataSet) -> None:
    result = run(small(rounds=12, data={"seed": 5}), tmp_path / "run", data=blobs)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    del summary["digest"], summary["record"]
    assert summary == result.summary
    assert summary.keys() >= SUMMARY
    accuracies = [record["accuracy"] for record in result.metrics]
    assert summary["final_accuracy"] == result.final_accuracy == accuracies[-1] > 0.5
    assert summary["best_accuracy"] == max(accuracies)
    assert summary["last10_accuracy"] == pytest.approx(sum(accuracies[2:]) / 10, rel=1e-12)
    assert summary["rounds"] == 12
    assert summary["seconds"] == pytest.approx(sum(record["train_seconds"] for record in result.metrics), abs=0.01)
    assert (summary["algorithm"], summary["variant"]) == ("fedfa", "default")
    assert summary["seeds"] == {"training": 1, "data": 5}
    assert summary["versions"].keys() >= {"fedfa", "torch", "numpy", "python"}
    assert summary["versions"]["fedfa"] == fedfa.__version__
    assert "commit" in summary


def test_bytes_are_what_is_sent(tmp_path: Path, blobs: DataSet) -> None:
    """6→8→4: 92 weights; anchors 4×8 down and up, and with each group its weight."""
    fedavg = run(small("fedavg"), tmp_path / "fedavg", data=blobs).metrics[0]
    weights = 6 * 8 + 8 + 8 * 4 + 4
    assert weights == 92
    assert fedavg["bytes_down"] == 4 * weights * 4
    assert fedavg["bytes_up"] == 4 * (weights + 1) * 4
    for kind, numbers in (("size", 1), ("count", 4)):
        config = small("fedfa", algorithm={"anchors": {"weights": kind}})
        anchors = run(config, tmp_path / kind, data=blobs).metrics[0]
        assert anchors["bytes_down"] == 4 * (weights + 32) * 4
        assert anchors["bytes_up"] == 4 * (weights + 1 + 32 + numbers) * 4


def test_what_is_left_at_the_end(tmp_path: Path, blobs: DataSet) -> None:
    result = run(small(), tmp_path / "run", data=blobs)
    assert equal_tensors(load_tensors(tmp_path / "run" / "model.safetensors"), result.model)
    server = load_tensors(tmp_path / "run" / "server.safetensors")
    assert server["anchors/anchors"].shape == (4, 8)
    assert server["round"].item() == 4
    engine = Experiment.from_config(small(), data=blobs).engine()
    assert engine.evaluate(result.model, {}).accuracy == result.final_accuracy


def test_a_watcher_sees_each_round_as_it_is_written(tmp_path: Path, blobs: DataSet) -> None:
    seen: list[tuple[int, int]] = []

    def watch(record: dict[str, Any]) -> None:
        seen.append((record["round"], len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())))

    run(small(), tmp_path / "run", data=blobs, watch=watch)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_evaluation_every_few_rounds_and_always_at_the_end(tmp_path: Path, blobs: DataSet) -> None:
    every = run(small(rounds=5), tmp_path / "every", data=blobs)
    some = run(small(rounds=5, evaluation={"every": 2}), tmp_path / "some", data=blobs)
    assert [r["accuracy"] is not None for r in some.metrics] == [False, True, False, True, True]
    for a, b in zip(every.metrics, some.metrics, strict=True):
        for key in ("accuracy", "loss", "class_accuracy", "domain_accuracy"):
            assert b[key] in (None, a[key])
    assert equal_tensors(every.model, some.model)
    assert some.summary["last10_accuracy"] == pytest.approx(
        sum(some.metrics[i]["accuracy"] for i in (1, 3, 4)) / 3, rel=1e-12
    )


def test_evaluation_batches_do_not_matter(tmp_path: Path, blobs: DataSet) -> None:
    whole = run(small(), tmp_path / "whole", data=blobs)
    components = run(small(evaluation={"batch_size": 7}), tmp_path / "components", data=blobs)
    assert [r["accuracy"] for r in whole.metrics] == [r["accuracy"] for r in components.metrics]
    assert equal_tensors(whole.model, components.model)


def test_accuracy_by_domain(tmp_path: Path, blobs: DataSet) -> None:
    domains = torch.arange(len(blobs.test)) % 3 // 2  # two thirds in one domain
    test = Samples(blobs.test.inputs, blobs.test.labels, domains)
    result = run(small(), tmp_path / "run", data=replace(blobs, test=test, domains=("one", "two")))
    last = result.metrics[-1]
    assert last["domain_accuracy"].keys() == {"one", "two"}
    assert last["accuracy"] == pytest.approx(sum(last["domain_accuracy"].values()) / 2)


# -- learning ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa"])
def test_a_run_learns(tmp_path: Path, blobs: DataSet, algorithm: str) -> None:
    result = run(small(algorithm, rounds=10, cohort={"clients": 6}), tmp_path / "run", data=blobs)
    assert result.final_accuracy > 0.85
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]


def test_one_client_with_all_data_is_plain_training(tmp_path: Path, blobs: DataSet) -> None:
    """A federation of one: what comes out is what torch's own loop gives with the same batches."""
    config = small(
        "fedavg", rounds=1, data={"clients": 1, "partition": "iid"}, cohort={"clients": 1},
        local={"epochs": 3, "batch_size": len(blobs.train), "momentum": 0.9},
    )  # fmt: skip
    result = run(config, tmp_path / "run", data=blobs)
    with torch_stream(config.seed, "model"):
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.001)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(blobs.train.inputs), blobs.train.labels).backward()
        optimiser.step()
    names = {"fc1.0.weight": "0.weight", "fc1.0.bias": "0.bias", "head.weight": "2.weight", "head.bias": "2.bias"}
    assert result.model.keys() == names.keys()
    for mine, theirs in names.items():
        assert torch.allclose(result.model[mine], network.state_dict()[theirs], atol=1e-5)


# -- buffers ----------------------------------------------------------------------------------------------------------
BUFFERS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_buffers_averaged(tmp_path: Path, blobs: DataSet) -> None:
    result = run(small(), tmp_path / "run", data=blobs, model=batch_norm_network)
    assert result.model["1.num_batches_tracked"].dtype == torch.int64
    assert result.model["1.num_batches_tracked"].item() > 0
    assert result.model["1.running_mean"].abs().sum() > 0
    assert client_states(tmp_path / "run") == {}


def test_buffers_kept_by_each_client(tmp_path: Path, blobs: DataSet) -> None:
    config = small(model={"buffers": "local"})
    result = run(config, tmp_path / "run", data=blobs, model=batch_norm_network)
    assert result.model["1.num_batches_tracked"].item() == 0, "the server's buffers must never move"
    states = client_states(tmp_path / "run")
    taken_part = {client for record in result.metrics for client in record["cohort"]}
    assert {int(name.partition(".")[0]) for name in states} == taken_part
    assert all(tensors.keys() == {f"model/{name}" for name in BUFFERS} for tensors in states.values())
    averaged = run(small(), tmp_path / "averaged", data=blobs, model=batch_norm_network)
    sent = 2 * 8 * 4 + 8  # mean, variance and the counter do not travel
    assert averaged.metrics[0]["bytes_down"] - result.metrics[0]["bytes_down"] == 4 * sent


def test_local_buffers_are_evaluated_with_each_clients_own(tmp_path: Path, blobs: DataSet) -> None:
    config = small(rounds=1, model={"buffers": "local"}, cohort={"clients": 6})
    result = run(config, tmp_path / "run", data=blobs, model=batch_norm_network)
    engine = Experiment.from_config(config, data=blobs, model=batch_norm_network).engine()
    each = []
    for tensors in client_states(tmp_path / "run").values():
        own = {name.removeprefix("model/"): value for name, value in tensors.items()}
        each.append(engine.evaluate({**result.model, **own}, {}).accuracy)
    assert len(set(each)) > 1
    assert result.final_accuracy == pytest.approx(sum(each) / 6)


def test_mean_of_evaluations() -> None:
    a = Evaluation(0.2, 1.0, [0.0, None, 0.4], {"x": 0.2, "y": 0.4})
    b = Evaluation(0.6, 3.0, [1.0, None, 0.6], {"x": 0.4, "y": 0.8})
    mean = mean_evaluation([a, b])
    assert (mean.accuracy, mean.loss) == pytest.approx((0.45, 2.0)), "over domains, as for one model"
    assert mean.class_accuracy == [0.5, None, 0.5]
    assert mean.domain_accuracy == pytest.approx({"x": 0.3, "y": 0.6})


# -- errors -----------------------------------------------------------------------------------------------------------
def test_training_that_diverges_stops_the_run_and_names_the_client(tmp_path: Path, blobs: DataSet) -> None:
    with pytest.raises(ClientError, match=r"client \d, round 1, local training: .*lower local\.lr"):
        run(small(local={"lr": 1e30}), tmp_path / "run", data=blobs)


def test_a_network_with_the_wrong_number_of_outputs(tmp_path: Path, blobs: DataSet) -> None:
    with pytest.raises(ModelError, match="3 outputs, but the data have 4 classes"):
        run(small(), tmp_path / "run", data=blobs, model=lambda: nn.Sequential(nn.Linear(6, 3)))


def test_a_cohort_larger_than_the_federation(tmp_path: Path, blobs: DataSet) -> None:
    with pytest.raises(ConfigError, match=r"the cohort has 7 clients, but only 6 of 6"):
        run(small(cohort={"clients": 7}), tmp_path / "run", data=blobs)


def test_unknown_data_names_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fashion-mnits"):
        run(small(data={"name": "fashion-mnits", "offline": True, "dir": str(tmp_path)}), tmp_path / "run")


def test_metrics_are_json_also_if_no_client_had_a_whole_batch(tmp_path: Path, blobs: DataSet) -> None:
    unequal = Federation(blobs, Partition(np.arange(240), np.array([0, 10, 20, 240])))
    config = small(rounds=6, local={"drop_last": True, "batch_size": 100}, cohort={"clients": 1})
    result = run(config, tmp_path / "run", data=unequal)
    assert None in [record["train_loss"] for record in result.metrics]
    with pytest.raises(ConfigError, match="no client would train"):
        run(small(rounds=1, local={"drop_last": True, "batch_size": 1000}), tmp_path / "none", data=blobs)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


class Overflowing(nn.Module):
    """Fine in training; in evaluation its features are beyond all bounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x * 1e38 * 1e38


def test_a_model_whose_loss_is_not_finite_is_recorded_as_none(tmp_path: Path, blobs: DataSet) -> None:
    result = run(
        small(rounds=1), tmp_path / "run", data=blobs, model=lambda: nn.Sequential(Overflowing(), nn.Linear(6, 4))
    )
    assert result.metrics[0]["loss"] is None


# -- methods from files -----------------------------------------------------------------------------------------------
OWN_METHOD = '''"""Pull to the start, with options of its own."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedfa import Component


@dataclass
class Helper:
    factor: float = 2.0


class Near(Component):
    """The term of FedProx."""

    mu: float = 0.1
    how: Literal["square", "none"] = "square"

    def loss(self, ctx, batch, loss):
        if self.how == "none":
            return loss
        parameters = ctx.model.module.named_parameters()
        return loss + self.mu / Helper().factor * sum((p - ctx.start[n]).square().sum() for n, p in parameters)
'''


def test_a_method_from_a_file(tmp_path: Path, blobs: DataSet) -> None:
    file = tmp_path / "near.py"
    file.write_text(OWN_METHOD)
    plain = run(small("fedavg"), tmp_path / "plain", data=blobs)
    without = run(small(str(file), algorithm={"near": {"mu": 0.0}}), tmp_path / "without", data=blobs)
    strong = run(small(str(file), algorithm={"near": {"mu": 10.0}}), tmp_path / "strong", data=blobs)
    assert equal_tensors(plain.model, without.model)
    start = Experiment.from_config(small("fedavg"), data=blobs).state.model

    def moved(model: Mapping[str, torch.Tensor]) -> float:
        return sum(float((model[name] - start[name]).square().sum()) for name in start)

    assert 0 < moved(strong.model) < 0.2 * moved(plain.model)
    assert tomllib.loads((tmp_path / "strong" / "config.toml").read_text())["algorithm"]["near"] == {
        "mu": 10.0, "how": "square",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.near\.mew.*allowed here: mu, how"):
        small(str(file), algorithm={"near": {"mew": 1}})


def test_a_method_from_a_file_combines_with_others(tmp_path: Path, blobs: DataSet) -> None:
    (tmp_path / "near.py").write_text(OWN_METHOD)
    config = small(f"fedfa+{tmp_path / 'near.py'}")
    assert [component.name for component in config.build_algorithm().components] == [
        "fedavg",
        "anchors",
        "calibration",
        "final",
        "near",
    ]
    assert run(config, tmp_path / "run", data=blobs).final_accuracy > 0.25


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_there_at_all", "cannot be imported: ModuleNotFoundError"),
        ("x = 1", "must define one Method"),
    ],
)
def test_a_file_without_a_method(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(AlgorithmError, match=words):
        small(str(tmp_path / "bad.py"))


def test_the_metrics_of_a_stateful_method_depend_on_the_state(tmp_path: Path, blobs: DataSet) -> None:
    """Else the tests of resume above would show nothing."""
    run(small("fedavg"), tmp_path / "fedavg", data=blobs)
    run(small(STATEFUL), tmp_path / "stateful", data=blobs)
    a, b = timeless(tmp_path / "fedavg"), timeless(tmp_path / "stateful")
    assert a[1]["loss"] != b[1]["loss"]
