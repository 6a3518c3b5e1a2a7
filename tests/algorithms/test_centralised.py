"""Centralised training: one site with all the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.data import DataSet
from fedfa.errors import AlgorithmError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.learning.random import stream
from tests.experiment.run_toys import client_states, equal_tensors, small


def test_it_is_sgd_on_all_data_with_as_many_steps_as_the_cohort_makes(tmp_path: Path, blobs: DataSet) -> None:
    """Six clients of 40, four a round, two epochs of batches of 16: 4·2·3 = 24 steps over 15 batches an epoch.

    So the first epoch is whole, and the second one stops after nine batches.
    """
    asked = small("centralised", rounds=2, local={"momentum": 0.9, "lr_decay": 0.5})
    result = run(asked, tmp_path / "run", data=blobs)
    experiment = Experiment.from_config(asked, data=blobs)
    start = experiment.state.model
    everybody = torch.cat([experiment.federation.client(k).positions for k in range(6)])
    assert sorted(everybody.tolist()) == list(range(240))
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), start.values(), strict=True):
            parameter.copy_(value)
    for t in range(2):
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1 * 0.5**t, momentum=0.9, weight_decay=0.001)
        shuffle = stream(asked.seed, "shuffle", t, 0)
        orders = [torch.from_numpy(shuffle.permutation(240)) for _ in range(2)]
        batches = [batch for order in orders for batch in torch.split(order, 16)][:24]
        for batch in batches:
            chosen = everybody[batch]
            optimiser.zero_grad()
            loss = functional.cross_entropy(network(blobs.train.inputs[chosen]), blobs.train.labels[chosen])
            loss.backward()
            optimiser.step()
    for name, expected in zip(start, network.parameters(), strict=True):
        assert_close(result.model[name], expected.detach(), rtol=1e-4, atol=1e-6)
    assert [record["cohort"] for record in result.metrics] == [[0], [0]]


def test_unequal_clients_count_with_their_own_steps(tmp_path: Path, blobs: DataSet) -> None:
    """The site makes the steps of the cohort that would have been drawn, whoever that is in this round."""
    asked = small("centralised", data={"partition": "quantity:0.5"}, cohort={"clients": 2}, rounds=3)
    fedavg = run(small("fedavg", data={"partition": "quantity:0.5"}, cohort={"clients": 2}, rounds=3),
                 tmp_path / "fedavg", data=blobs)  # fmt: skip
    sizes = Experiment.from_config(asked, data=blobs).sizes
    steps = [sum(2 * -(-int(sizes[k]) // 16) for k in record["cohort"]) for record in fedavg.metrics]
    assert len(set(steps)) > 1, "else the test shows nothing"
    result = run(asked, tmp_path / "run", data=blobs)
    # batches of 16 of 240 samples are all whole, so samples count steps
    for record, expected in zip(result.metrics, steps, strict=True):
        seen = record["samples_per_second"] * record["train_seconds"] / 16
        assert seen == pytest.approx(expected, rel=0.05)


def test_how_the_data_were_split_matters_no_more(tmp_path: Path, blobs: DataSet) -> None:
    """With one batch of everything the split shows in nothing."""
    models = [
        run(
            small("centralised", rounds=2, data={"partition": split}, local={"batch_size": 240}),
            tmp_path / split.replace(":", "-"),
            data=blobs,
        ).model
        for split in ("shards:2", "iid")
    ]
    for name, value in models[0].items():
        assert_close(value, models[1][name], rtol=1e-4, atol=1e-6)


def test_it_learns_what_skewed_clients_do_not(tmp_path: Path, blobs: DataSet) -> None:
    centralised, fedavg = (
        run(small(algorithm, rounds=2), tmp_path / algorithm, data=blobs).final_accuracy
        for algorithm in ("centralised", "fedavg")
    )
    assert centralised > 0.85 > fedavg


def test_a_server_optimiser_goes_with_it(tmp_path: Path, blobs: DataSet) -> None:
    """FedAvgM without momentum and with rate one is nothing at all."""
    idle = {"fedavgm": {"momentum": 0.0, "lr": 1.0}}
    plain = run(small("centralised"), tmp_path / "plain", data=blobs)
    with_idle = run(small("centralised+fedavgm", algorithm=idle), tmp_path / "idle", data=blobs)
    other = run(small("centralised+fedadam"), tmp_path / "adam", data=blobs)
    assert equal_tensors(plain.model, with_idle.model)
    assert not equal_tensors(plain.model, other.model)


def test_methods_with_client_state_have_one_client(tmp_path: Path, blobs: DataSet) -> None:
    """SCAFFOLD's c_i is its c then, so the correction is zero: plain training up to the rounding of c."""
    plain = run(small("centralised"), tmp_path / "plain", data=blobs)
    scaffold = run(small("centralised+scaffold"), tmp_path / "scaffold", data=blobs)
    assert {name.partition(".")[0] for name in client_states(tmp_path / "scaffold")} == {"0"}
    for name, value in plain.model.items():
        assert_close(scaffold.model[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["centralised+local", "centralised+fedbn"])
def test_methods_that_keep_the_model_on_clients_are_refused(algorithm: str) -> None:
    with pytest.raises(AlgorithmError, match=r"'centralised' cannot be combined with .*all data are in one place"):
        small(algorithm).build_algorithm()
