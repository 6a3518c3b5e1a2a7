"""Ditto and FedRep against steps by hand, closed forms and plain torch loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

import fedfa
from fedfa.algorithms import Ditto, FedAvg, FedRep
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError
from fedfa.experiment.record import whose_accuracy
from fedfa.experiment.run import run
from fedfa.learning.context import LocalTraining
from fedfa.learning.random import stream
from fedfa.learning.tensors import Tensors
from tests.algorithms.federation_harness import Federation, Samples
from tests.algorithms.toy import CLASSES, Network, shuffled, toy_federation, toy_samples
from tests.experiment.run_toys import assert_same_run, small


def full_batch(component: Ditto, lr: float = 0.1, weight_decay: float = 0.0, epochs: int = 1) -> Federation:
    """Clients of the toy task that take one step per epoch, over all their samples."""
    torch.manual_seed(1)
    clients = [Samples(x, y, CLASSES) for x, y in toy_samples(1)]
    local = LocalTraining(epochs=epochs, batch_size=100, lr=lr, weight_decay=weight_decay)
    return Federation(component, Network().double(), clients, local)


def gradient_at(weights: Tensors, client: int) -> Tensors:
    network = Network().double()
    network.load_state_dict(weights)
    x, y = (torch.from_numpy(values) for values in toy_samples(1)[client])
    loss = functional.cross_entropy(network(x), y)
    names = [name for name, _ in network.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(network.parameters())), strict=True))


def test_ditto_s_step_by_hand() -> None:
    """v ← v − η (∇F(v) + λ (v − w_t)), twice: first from w_0 itself, then from v with the second global model."""
    federation = full_batch(Ditto(lam=0.7), lr=0.2)
    start = {name: value.clone() for name, value in federation.state.model.items()}
    federation.round()
    first = {name: start[name] - 0.2 * step for name, step in gradient_at(start, 0).items()}
    assert_close(federation.client_states.load(0)["ditto"], first, rtol=1e-12, atol=1e-14)
    received = {name: value.clone() for name, value in federation.state.model.items()}
    federation.round()
    gradient = gradient_at(first, 0)
    second = {n: first[n] - 0.2 * (gradient[n] + 0.7 * (first[n] - received[n])) for n in first}
    assert_close(federation.client_states.load(0)["ditto"], second, rtol=1e-11, atol=1e-13)


def test_the_pull_alone_is_a_geometric_approach() -> None:
    """Where the loss has no gradient (lr so small that weights do not move), v − w shrinks by 1 − ηλ in each step.

    The client's own learning rate is 1e-3 and λ = 500, so each of four steps halves the distance to w_t, up to the
    gradient's 1e-3: compared with the recursion written out.
    """
    federation = full_batch(Ditto(lam=500.0, lr=1e-3, epochs=4), lr=1e-9)
    federation.round()
    far = {name: value + 1.0 for name, value in federation.state.model.items()}
    federation.client_states[0]["ditto"] = {name: value.clone() for name, value in far.items()}
    received = {name: value.clone() for name, value in federation.state.model.items()}
    federation.round([0])
    v = far
    for _ in range(4):
        gradient = gradient_at(v, 0)
        v = {name: v[name] - 1e-3 * (gradient[name] + 500 * (v[name] - received[name])) for name in v}
    found = federation.client_states.load(0)["ditto"]
    assert_close(found, v, rtol=1e-10, atol=1e-12)
    for name, value in found.items():
        assert float((value - received[name]).abs().max()) == pytest.approx(1 / 16, rel=0.05)


def test_ditto_leaves_the_global_model_alone() -> None:
    with_ditto, without = toy_federation(Ditto()), toy_federation(FedAvg())
    for _ in range(2):
        with_ditto.round()
        without.round()
    for name, value in without.state.model.items():
        assert torch.equal(with_ditto.state.model[name], value), name


def test_without_a_pull_ditto_s_models_are_those_of_local_training() -> None:
    """λ = 0: v is SGD on the client's samples in the order of its own stream, for as many epochs."""
    federation = toy_federation(Ditto(lam=0.0), epochs=2, lr=0.1, weight_decay=0.01)
    start = {name: value.clone() for name, value in federation.state.model.items()}
    federation.round()
    for client, (x, y) in enumerate(toy_samples(1)):
        network = Network().double()
        network.load_state_dict(start)
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.01)
        draw = stream(1, "client", 0, client)
        for _ in range(2):
            order = torch.from_numpy(draw.permutation(len(y)))
            for batch in torch.split(order, federation.local.batch_size):
                optimiser.zero_grad()
                functional.cross_entropy(network(torch.from_numpy(x)[batch]), torch.from_numpy(y)[batch]).backward()
                optimiser.step()
        for name, value in network.state_dict().items():
            assert_close(federation.client_states.load(client)["ditto"][name], value, rtol=1e-9, atol=1e-12)


def test_fedrep_trains_the_head_first_and_then_the_representation() -> None:
    """Against a plain loop: two epochs of the head, then one of the representation, with the client's shuffles."""
    federation = toy_federation(FedRep(), epochs=3, lr=0.1, weight_decay=0.01)
    start = {name: value.clone() for name, value in federation.state.model.items()}
    sizes, bodies = [], []
    for client, (x, y) in enumerate(toy_samples(1)):
        network = Network().double()
        network.load_state_dict(start)
        for number, epoch in enumerate(shuffled(1, 0, client, len(y), epochs=3)):
            part = network.classifier if number < 2 else network.hidden
            optimiser = torch.optim.SGD(part.parameters(), lr=0.1, weight_decay=0.01)
            for batch in epoch:
                network.zero_grad()
                functional.cross_entropy(network(torch.from_numpy(x)[batch]), torch.from_numpy(y)[batch]).backward()
                optimiser.step()
        federation.train(client)
        own = federation.client_states.load(client)["model"]
        assert set(own) == {"classifier.weight", "classifier.bias"}
        for name, value in network.classifier.named_parameters():
            assert_close(own[f"classifier.{name}"], value.detach(), rtol=1e-9, atol=1e-12)
        sizes.append(len(y))
        bodies.append({name: value.detach() for name, value in network.hidden.named_parameters()})
    again = toy_federation(FedRep(), epochs=3, lr=0.1, weight_decay=0.01)
    again.round()
    for name in bodies[0]:
        mean = sum(n * body[name] for n, body in zip(sizes, bodies, strict=True)) / sum(sizes)
        assert_close(again.state.model[f"hidden.{name}"], mean, rtol=1e-9, atol=1e-12)
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.equal(again.state.model[name], start[name])  # the server has no head but the initial one


def test_fedrep_needs_epochs_for_the_head() -> None:
    with pytest.raises(AlgorithmError, match="raise local"):
        toy_federation(FedRep(body_epochs=3), epochs=3)


@pytest.mark.parametrize("method", ["ditto", "fedrep"])
def test_they_resume_and_share_work_with_the_same_bits(method: str, blobs: DataSet, tmp_path: Path) -> None:
    run(small(method, rounds=3), tmp_path / "whole", data=blobs)
    run(small(method, rounds=1), tmp_path / "pieces", data=blobs)
    run(small(method, rounds=3, engine={"workers": 2}), tmp_path / "pieces", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "pieces")


def test_personal_models_beat_the_global_one_on_their_own_data(blobs: DataSet) -> None:
    """Two of four classes per client: what users ask for, and a record that says whose model it is."""
    data = blobs.split("shards:2", clients=6, seed=1)
    local = fedfa.LocalTraining(epochs=4, batch_size=16, lr=0.05)
    for method in ("ditto", "fedrep"):
        experiment = fedfa.Experiment(method, data=data, model="mlp", cohort=6, local=local)
        *_, record = experiment.rounds(4)
        assert record.own_data["model"] == "clients"
        assert record.own_data["mean"] > 0.9
        mine = experiment.weights(client=0)
        assert any(not torch.equal(mine[name], experiment.state.model[name]) for name in mine)
    ditto = fedfa.Experiment("ditto", data=data, model="mlp", cohort=6, local=local)
    (first,) = ditto.rounds(1)
    assert whose_accuracy([first])["model"] == "global"
    labels = data.client(2).label_counts.numpy()
    right = (ditto.predict(data.dataset.test.inputs, client=2) == data.dataset.test.labels).numpy()
    by_class = np.array([right[data.dataset.test.labels.numpy() == c].mean() for c in range(4)])
    assert 0 <= float((labels * by_class).sum() / labels.sum()) <= 1
