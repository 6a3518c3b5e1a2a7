"""The benchmark's own contenders do the work that is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.bench import fedfa_rounds, interleaved_methods, torch_loop
from benchmarks.bench.contender_api import CNN, ENV_ARRAYS, ENV_RESULT, MLP, client_tensors, network
from benchmarks.bench.fedfa_tasks import client_round, config, dataset, prepared, write_arrays
from benchmarks.bench.step_profile import matmul_peak
from fedfa.experiment.experiment import Experiment
from fedfa.models.zoo import build_model


@pytest.fixture
def directory(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    monkeypatch.setenv(ENV_ARRAYS, str(tmp_path))
    monkeypatch.setenv(ENV_RESULT, str(tmp_path / "result.json"))
    write_arrays(MLP, tmp_path)
    return tmp_path


def reported(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "result.json").read_text())
    return found


def test_the_arrays_hold_the_same_clients_as_fedfa(directory: Path) -> None:
    federation = Experiment.from_config(config(MLP), data=dataset(MLP)).federation
    clients = client_tensors(MLP)
    assert len(clients) == len(federation) == MLP.clients
    for number in (0, 57, 99):
        x, y = federation.client(number).batch(torch.arange(MLP.samples))
        assert torch.equal(clients[number][0], x.flatten(1))
        assert torch.equal(clients[number][1], y)


def test_the_plain_network_matches_fedfas() -> None:
    """Equal shapes of all weights, in order; and pooling before ReLU is the same function."""
    ours = build_model("cnn-fmnist", (1, 28, 28), 10)
    plain, pooled = network(CNN), network(CNN, pool_first=True)
    assert [p.shape for p in plain.parameters()] == [p.shape for p in ours.parameters()]
    small = build_model("mlp", (64,), 10, {"hidden": [32]})
    assert [p.shape for p in network(MLP).parameters()] == [p.shape for p in small.parameters()]
    x = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    assert torch.equal(plain(x), pooled(x))


def test_the_work_of_a_round_matches_fedfas(directory: Path) -> None:
    assert MLP.sample_steps == 10 * 5 * 17
    assert MLP.steps == config(MLP).local.in_round(0).steps_on(MLP.samples)
    assert CNN.sample_steps == 30_000


@pytest.mark.system
@pytest.mark.parametrize("flags", [[], ["--tuned"], ["--tuned", "--without", "memory", "--without", "fused"]])
def test_the_loop_reports_all_rounds_but_the_first(directory: Path, flags: list[str]) -> None:
    torch_loop.main(["--task", "mlp", "--rounds", "4", "--processes", "1", *flags])
    seconds = reported(directory)["seconds"]
    assert isinstance(seconds, list)
    assert len(seconds) == 3
    assert min(seconds) > 0


def test_the_loop_takes_every_step_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    class Counting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]  # torch has two forms
            nonlocal steps
            steps += 1
            super().step()

    model = network(MLP)
    before = [p.clone() for p in model.parameters()]
    x, y = torch.randn(MLP.samples, 64), torch.randint(10, (MLP.samples,))
    torch_loop.train(MLP, model, Counting(model.parameters(), lr=0.1), x, y, torch.Generator(), False)
    assert steps == MLP.steps == 15
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_fedfa_run_reports_all_rounds_but_the_first_and_the_evaluated_last(directory: Path) -> None:
    fedfa_rounds.main(["--task", "mlp", "--rounds", "4", "--set", "engine.workers=1", "--set", "algorithm.name=fedfa"])
    found = reported(directory)
    assert isinstance(found["seconds"], list)
    assert isinstance(found["cpu_seconds"], list)
    assert len(found["seconds"]) == 3
    assert all(cpu > 0 for cpu in found["cpu_seconds"])


def test_interleaved_methods_each_train_in_every_slot(directory: Path) -> None:
    interleaved_methods.main(["--task", "mlp", "--methods", "fedavg", "moon", "--slots", "3", "--clients", "2"])
    seconds = reported(directory)["cpu_seconds"]
    assert isinstance(seconds, dict)
    assert {name: len(times) for name, times in seconds.items()} == {"fedavg": 3, "moon": 3}
    assert all(time > 0 for times in seconds.values() for time in times)


def test_a_client_that_trains_again_has_its_client_state(directory: Path) -> None:
    experiment = prepared(MLP, "scaffold", dataset(MLP))
    given: list[bool] = []
    (scaffold,) = (component for component in experiment.algorithm.components if component.name == "scaffold")
    experiment.algorithm.hooks("begin").append(lambda ctx: given.append(bool(ctx.client_state.get(scaffold.name))))
    train = client_round(experiment)
    for client in (3, 3, 4, 3):
        train(client)
    assert given == [False, True, False, True]


def test_a_task_with_fewer_clients_has_as_many_samples_per_client(directory: Path) -> None:
    few = replace(MLP, clients=10)
    assert Experiment.from_config(config(few), data=dataset(few)).federation.partition.sizes.tolist() == [17] * 10


def test_scaling_uses_the_requested_numbers_of_clients(directory: Path) -> None:
    fedfa_rounds.main(["--task", "pictures", "--clients", "2000", "--cohort", "5", "--rounds", "3"])
    found = reported(directory)
    assert (found["clients"], found["cohort"]) == (2000, 5)
    # 2000 clients with 10 pictures of 16 bytes and a label of 8, and 1000 test pictures.
    assert found["data_mb"] == (20_000 + 1000) * 24 / 2**20
    assert isinstance(found["resident_mb"], float)
    assert found["resident_mb"] > 50


def test_the_matmul_peak_is_a_plausible_speed() -> None:
    assert 1e8 < matmul_peak(sizes=(128,), seconds=0.05) < 1e13
