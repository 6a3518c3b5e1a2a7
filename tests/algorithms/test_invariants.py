"""What must hold of FedAvg and FedFA whatever the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from tests.algorithms.toy import BATCH, CLASSES, Network, anchors_of, shuffled, toy_federation, toy_samples, toy_weights
from tests.algorithms.transcription import Array, Index

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedavg uniform": {"name": "fedavg", "fedavg": {"weighting": "uniform"}},
    "fedfa paper": {"name": "fedfa", "variant": "paper"},
    "fedfa authors": {"name": "fedfa", "variant": "authors"},
    "fedfa default": {"name": "fedfa"},
}
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


@pytest.mark.parametrize("seed", [1, 2])
def test_fedavg_with_one_client_is_plain_sgd(seed: int) -> None:
    """Two rounds of one client: torch's own SGD over the same batches, its memory cleared between the rounds."""
    x, y = toy_samples(seed)[0]
    local: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    federation = toy_federation("fedavg", [(x, y)], weights=toy_weights(seed), seed=seed, **local)
    found = [federation.round().model for _ in range(2)]

    network = Network().double()
    network.load_state_dict({name: torch.from_numpy(value) for name, value in toy_weights(seed).items()})
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    for t in range(2):
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for epoch in shuffled(seed, t, client=0, size=len(y)):
            for batch in epoch:
                optimiser.zero_grad()
                loss = functional.cross_entropy(network(inputs[batch]), labels[batch])
                loss.backward()
                optimiser.step()
        assert_close(found[t], dict(network.state_dict()), rtol=1e-12, atol=1e-14)


@every_algorithm
def test_the_order_of_the_clients_does_not_matter(algorithm: dict[str, Any]) -> None:
    """Beyond the rounding of sums in double precision."""
    results = [toy_federation(algorithm).run(2, order).tensors() for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))]
    for result in results[1:]:
        assert_close(result, results[0], rtol=1e-12, atol=1e-14)


@every_algorithm
def test_identical_clients_do_as_one(algorithm: dict[str, Any]) -> None:
    """Three clients with the same samples, all in one batch so that the shuffling does not tell them apart."""
    samples = toy_samples(1)[2]
    one, three = (
        toy_federation(algorithm, [samples] * count, batch_size=len(samples[1])).run(2).state.to_tensors()
        for count in (1, 3)
    )
    assert_close(three, one, rtol=1e-10, atol=1e-12)


@every_algorithm
def test_a_client_s_result_does_not_depend_on_who_was_trained_before(algorithm: dict[str, Any]) -> None:
    """One network and one optimiser serve all clients: nothing of a client may stay in them. Bit for bit."""
    alone, after_others = (toy_federation(algorithm, momentum=0.9) for _ in range(2))
    for client in (0, 1):
        after_others.train(client)
    for group, entry in alone.train(2).contribution.items():
        other = after_others.train(2).contribution[group]
        assert torch.equal(entry.weight, other.weight)
        for name, value in entry.tensors.items():
            assert torch.equal(value, other.tensors[name]), f"{group} {name}"


@every_algorithm
def test_training_leaves_what_was_sent_alone(algorithm: dict[str, Any]) -> None:
    """The broadcast serves every client, so no client may write into it; nor may the server's step."""
    federation = toy_federation(algorithm)
    sent = federation.state
    before = {name: value.clone() for name, value in sent.to_tensors().items()}
    federation.round()
    for name, value in sent.to_tensors().items():
        assert torch.equal(value, before[name]), name


@every_algorithm
def test_a_seed_is_a_run(algorithm: dict[str, Any]) -> None:
    """The same seed gives the same bits, another seed another shuffling."""
    runs = [toy_federation(algorithm, seed=seed).run(2).tensors() for seed in (1, 1, 2)]
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    assert not torch.equal(runs[0]["model/hidden.weight"], runs[2]["model/hidden.weight"])


@pytest.mark.parametrize("variant", ["paper", "authors", "default"])
def test_classes_are_only_names(variant: str) -> None:
    """Renaming the classes (labels, classifier rows and anchors together) renames the result and changes nothing."""
    renamed_as = np.array([3, 0, 4, 1, 2])
    algorithm = {"name": "fedfa", "variant": variant}
    original = toy_federation(algorithm)

    samples: list[tuple[Array, Index]] = [(x, renamed_as[y]) for x, y in toy_samples(1)]
    weights = toy_weights(1)
    old_name = np.argsort(renamed_as)
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name][old_name]
    renamed = toy_federation(algorithm, samples, weights=weights)
    renamed.state.components["anchors"]["anchors"] = original.state.components["anchors"]["anchors"][
        torch.from_numpy(old_name)
    ]

    original.run(2)
    renamed.run(2)
    assert len(renamed_as) == CLASSES
    np.testing.assert_allclose(anchors_of(renamed)[renamed_as], anchors_of(original), rtol=1e-10, atol=1e-12)
    for name, value in original.state.model.items():
        other = renamed.state.model[name]
        other = other[torch.from_numpy(renamed_as)] if name.startswith("classifier") else other
        assert_close(other, value, rtol=1e-10, atol=1e-12)


def test_the_toy_has_the_properties_that_tests_rely_on() -> None:
    """Clients that lack classes, a class without samples, sizes that differ, incomplete last batches, open ReLUs."""
    samples = toy_samples(1)
    held = [set(y.tolist()) for _, y in samples]
    assert held == [{0, 1}, {1, 2}, {0, 1, 2, 3}]
    assert len({len(y) for _, y in samples}) == 3
    assert all(len(y) % BATCH for _, y in samples)
    weights = toy_weights(1)
    open_share = np.mean([np.mean(x @ weights["hidden.weight"].T + weights["hidden.bias"] > 0) for x, _ in samples])
    assert 0.3 < open_share < 0.95
