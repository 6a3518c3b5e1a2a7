"""Evaluation where clients keep tensors of their own: each with its own model, on the domains it has data of.

Two domains of the same four clouds. In ``moved`` every point is stretched and shifted, so that a network which was made
for ``plain`` is lost there unless it normalises by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfa.data import DataSet, Normalisation, Samples
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import RunResult, run
from fedfa.experiment.run_directory import RunDirectory
from tests.conftest import make_blobs
from tests.experiment.run_toys import assert_same_run, small

DOMAINS = ("plain", "moved")


def two_domains(train: int = 240, test: int = 80) -> DataSet:
    """The blobs twice; test samples of the second domain are three times as many, so that means must be taken right."""
    blobs = make_blobs(train, 4 * test)

    def moved(points: Tensor) -> Tensor:
        return points * torch.tensor([4.0, 1.0, 3.0, 0.2, 6.0, 0.5]) + torch.tensor([9.0, -7.0, 5.0, 3.0, -8.0, 6.0])

    def samples(source: Samples, first: int) -> Samples:
        points = torch.cat([source.inputs[:first], moved(source.inputs[first:])])
        domains = (torch.arange(len(points)) >= first).long()
        return Samples(points, source.labels, domains)

    return DataSet(
        name="two-domains", train=samples(blobs.train, train // 2), test=samples(blobs.test, test),
        classes=blobs.classes, domains=DOMAINS, normalisation=Normalisation(), fingerprint="two-domains", manifest={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def data() -> DataSet:
    return two_domains()


def network() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def config(algorithm: str, **more: Any) -> Config:
    """Three clients for each domain: 0, 1, 2 hold ``plain``, 3, 4, 5 hold ``moved``."""
    return small(algorithm, **{"data": {"partition": "domains"}, "cohort": {"clients": 6}, **more})


def go(algorithm: str, directory: Path, data: DataSet, **more: Any) -> RunResult:
    return run(config(algorithm, **more), directory / algorithm.replace("+", "-"), data=data, model=network)


def test_a_client_is_evaluated_on_its_own_domains(data: DataSet) -> None:
    federation = Experiment.from_config(config("local"), data=data, model=network).federation
    domains = [federation.test_of(client).domains for client in range(6)]
    assert [of_one is not None and of_one.unique().tolist() for of_one in domains] == [[0]] * 3 + [[1]] * 3
    assert [len(federation.test_of(k)) for k in range(6)] == [80] * 3 + [240] * 3
    mixed = Experiment.from_config(config("local", data={"partition": "iid"}), data=data, model=network).federation
    assert [len(mixed.test_of(k)) for k in range(6)] == [320] * 6


@pytest.mark.parametrize("algorithm", ["local", "fedbn"])
def test_the_numbers_are_those_of_each_clients_own_model(tmp_path: Path, data: DataSet, algorithm: str) -> None:
    """By hand from the clients' files: the server's tensors, overlaid with the client's, on the client's domain."""
    result = go(algorithm, tmp_path, data, rounds=2)
    experiment = Experiment.from_config(config(algorithm), data=data, model=network)
    directory = RunDirectory(result.directory)
    directory.reopen()
    each = {}
    for client in range(6):
        experiment.task.model.load({**result.model, **directory.load_client_state(client)["model"]})
        experiment.task.model.module.eval()
        chosen = data.test.domains == client // 3
        with torch.no_grad():
            predicted = experiment.task.model(data.test.inputs[chosen])[1].argmax(1)
        each[str(client)] = float((predicted == data.test.labels[chosen]).double().mean())
    directory.close()
    last = result.metrics[-1]
    assert last["client_accuracy"] == pytest.approx(each)
    assert last["domain_accuracy"] == pytest.approx({
        "plain": sum(each[str(k)] for k in (0, 1, 2)) / 3, "moved": sum(each[str(k)] for k in (3, 4, 5)) / 3,
    })  # fmt: skip
    assert last["accuracy"] == pytest.approx(sum(each.values()) / 6)
    assert len(set(each.values())) > 1, "else the test shows nothing"


def test_only_this_rounds_clients_are_evaluated(tmp_path: Path, data: DataSet) -> None:
    result = go("fedbn", tmp_path, data, cohort={"clients": 2}, rounds=6)
    for record in result.metrics:
        assert record["client_accuracy"].keys() == {str(client) for client in record["cohort"]}
        assert record["domain_accuracy"].keys() == {DOMAINS[client // 3] for client in record["cohort"]}
        mean = sum(record["domain_accuracy"].values()) / len(record["domain_accuracy"])
        assert record["accuracy"] == pytest.approx(mean)  # two clients: of one domain each, or both of one
    assert {len(record["domain_accuracy"]) for record in result.metrics} == {1, 2}, "else the test shows nothing"


def test_accuracy_is_the_mean_over_domains_not_over_clients(tmp_path: Path, data: DataSet) -> None:
    """Four clients of three and three: two of them of the one domain or three, and each domain counts once."""
    result = go("local", tmp_path, data, cohort={"clients": 4}, rounds=6)
    uneven = 0
    for record in result.metrics:
        mean = sum(record["domain_accuracy"].values()) / len(record["domain_accuracy"])
        assert record["accuracy"] == pytest.approx(mean)
        uneven += record["accuracy"] != pytest.approx(sum(record["client_accuracy"].values()) / 4)
    assert uneven, "else the test shows nothing"


def test_where_there_is_a_global_model_nothing_of_this_happens(tmp_path: Path, data: DataSet) -> None:
    record = go("fedavg", tmp_path, data).metrics[-1]
    assert "client_accuracy" not in record
    assert record["domain_accuracy"].keys() == set(DOMAINS)
    assert record["accuracy"] == pytest.approx(sum(record["domain_accuracy"].values()) / 2)


def test_layers_of_their_own_help_where_pictures_look_different(tmp_path: Path, data: DataSet) -> None:
    """What FedBN is for: one normalisation cannot fit both domains, and each client's own fits its own."""
    fedbn, fedavg = (go(algorithm, tmp_path, data, rounds=5) for algorithm in ("fedbn", "fedavg"))
    assert fedbn.final_accuracy > fedavg.final_accuracy + 0.05
    assert min(fedbn.metrics[-1]["domain_accuracy"].values()) > min(fedavg.metrics[-1]["domain_accuracy"].values())


@pytest.mark.parametrize("algorithm", ["local", "fedbn", "fedfa+fedbn"])
def test_stopped_and_resumed_it_ends_the_same(tmp_path: Path, data: DataSet, algorithm: str) -> None:
    """Also the evaluations, which read client state: from the run directory, or of this round."""
    asked = config(algorithm, cohort={"clients": 3}, checkpoint={"every": 2})
    whole = run(asked, tmp_path / "whole", data=data, model=network)

    def stop_at(round: int) -> Any:
        def watch(record: Mapping[str, Any]) -> None:
            if record["round"] == round:
                raise KeyboardInterrupt

        return watch

    for round in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run(asked, tmp_path / "stopped", data=data, model=network, resume=True, watch=stop_at(round))
    run(asked, tmp_path / "stopped", data=data, model=network, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert len(whole.metrics) == 4


def test_two_rounds_and_two_more_are_four(tmp_path: Path, data: DataSet) -> None:
    for rounds in (2, 4):
        run(config("fedbn", rounds=rounds), tmp_path / "longer", data=data, model=network, resume=rounds == 4)
    run(config("fedbn", rounds=4), tmp_path / "whole", data=data, model=network)
    assert_same_run(tmp_path / "longer", tmp_path / "whole")
