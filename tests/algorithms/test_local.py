"""Local training: every client by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.data import DataSet
from fedfa.errors import AlgorithmError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.learning.context import Role
from fedfa.learning.random import stream
from tests.experiment.run_toys import client_states, equal_tensors, small


def config(**more: object) -> Config:
    return small("local", **more)


def test_every_client_trains_by_itself(tmp_path: Path, blobs: DataSet) -> None:
    """Client by client: torch's own SGD over its batches of the rounds in which it was drawn, and no other client's."""
    asked = config(rounds=4, local={"momentum": 0.9, "lr_decay": 0.5})
    result = run(asked, tmp_path / "run", data=blobs)
    experiment = Experiment.from_config(asked, data=blobs)
    start = experiment.state.model
    client_state = client_states(tmp_path / "run")
    taken_part = {client for record in result.metrics for client in record["cohort"]}
    assert {int(name.partition(".")[0]) for name in client_state} == taken_part
    for file, tensors in client_state.items():
        client = int(file.partition(".")[0])
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        with torch.no_grad():
            for parameter, value in zip(network.parameters(), start.values(), strict=True):
                parameter.copy_(value)
        data = experiment.federation.client(client)
        rounds = [record["round"] - 1 for record in result.metrics if client in record["cohort"]]
        for t in rounds:
            optimiser = torch.optim.SGD(network.parameters(), lr=0.1 * 0.5**t, momentum=0.9, weight_decay=0.001)
            shuffle = stream(asked.seed, "shuffle", t, client)
            for _ in range(2):
                order = torch.from_numpy(shuffle.permutation(data.size))
                for batch in torch.split(order, 16):
                    x, y = data.batch(batch)
                    optimiser.zero_grad()
                    functional.cross_entropy(network(x), y).backward()
                    optimiser.step()
        for (name, value), expected in zip(start.items(), network.parameters(), strict=True):
            assert_close(tensors[f"model/{name}"], expected.detach(), rtol=1e-4, atol=1e-6)
            assert not torch.equal(tensors[f"model/{name}"], value)


def test_nothing_is_sent_and_the_server_never_moves(tmp_path: Path, blobs: DataSet) -> None:
    result = run(config(), tmp_path / "run", data=blobs)
    assert [(record["bytes_up"], record["bytes_down"]) for record in result.metrics] == [(0, 0)] * 4
    assert equal_tensors(result.model, Experiment.from_config(config(), data=blobs).state.model)


def test_buffers_are_local_and_what_is_switched_off_stays_frozen(blobs: DataSet) -> None:
    def network() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        net[0].weight.requires_grad_(False)
        return net

    roles = Experiment.from_config(config(), data=blobs, model=network).roles
    assert {name for name, role in roles.items() if role is Role.FROZEN} == {"0.weight"}
    assert {role for name, role in roles.items() if name != "0.weight"} == {Role.LOCAL}


def test_the_result_is_the_mean_over_the_rounds_clients(tmp_path: Path, blobs: DataSet) -> None:
    result = run(config(cohort={"clients": 6}), tmp_path / "run", data=blobs)
    last = result.metrics[-1]
    assert last["client_accuracy"].keys() == {str(client) for client in range(6)}
    assert last["accuracy"] == pytest.approx(sum(last["client_accuracy"].values()) / 6)
    assert max(last["client_accuracy"].values()) <= 0.75, "a client that holds at most three classes of four"


@pytest.mark.parametrize(
    "algorithm",
    ["local+fedadam", "local+fedavgm", "local+fedprox", "local+moon", "local+fedfa", "local+fedproc", "local+fedproto",
     "local+fedbn", "local+scaffold", "local+fednova", "local+feddyn", "local+matching", "local+centralised"],
)  # fmt: skip
def test_what_shares_something_is_refused(algorithm: str) -> None:
    with pytest.raises(AlgorithmError) as error:
        small(algorithm).build_algorithm()
    assert "'local'" in str(error.value) or "local," in str(error.value)
    assert "leave" in str(error.value) or "choose" in str(error.value)


def test_a_loss_of_the_clients_own_goes_with_it(tmp_path: Path, blobs: DataSet) -> None:
    plain, with_loss = (run(small(text), tmp_path / text, data=blobs) for text in ("local", "local+fedlc"))
    assert plain.metrics[-1]["loss"] != with_loss.metrics[-1]["loss"]
    assert with_loss.metrics[-1]["bytes_up"] == 0
