"""Attacks: what attackers send and train on, by hand; what a rule makes of it."""

from __future__ import annotations

import math

import pytest
import torch

from fedfa import Experiment, LocalTraining
from fedfa.data import DataSet, load
from fedfa.errors import ConfigError
from fedfa.flower.config import RunConfig
from fedfa.protection.attacks import attackers, hidden_deviations, patched, poisoned, triggered
from fedfa.protection.settings import AttackConfig
from tests.protection.small import experiment, one_round


def attack(kind: str, **more: object) -> dict[str, object]:
    return {"attack": {"kind": kind, "share": 0.25, **more}}


def updates(made: Experiment, name: str, clients: list[int]) -> torch.Tensor:
    """Sent means of some clients, one per row."""
    _, statistics = one_round(made)
    entries = [statistics.results[client].contribution["fedavg/model"] for client in clients]
    return torch.stack([entry.tensors[name].double() / entry.weight.double() for entry in entries])


def moved(data: DataSet, settings: dict[str, object]) -> torch.Tensor:
    """The server's update in the first round, with equal weights."""
    made = experiment(data, {**settings, "algorithm": {"fedavg": {"weighting": "uniform"}}})
    name = next(key for key in made.state.model if key.endswith("weight"))
    state, _ = one_round(made)
    return state.model[name].double() - made.state.model[name].double()


def test_attackers_are_chosen_by_the_seed_and_as_many_as_asked() -> None:
    config = AttackConfig(kind="sign-flip", share=0.3)
    assert attackers(config, 20, 1) == attackers(config, 20, 1) != attackers(config, 20, 2)
    assert len(set(attackers(config, 20, 1))) == 6
    assert attackers(AttackConfig(share=0.3), 20, 1) == []


@pytest.mark.parametrize("kind", ["sign-flip", "scaling", "inner-product", "alie"])
def test_the_mean_of_a_cohort_with_attackers_is_the_one_by_hand(kind: str, blobs: DataSet) -> None:
    bad = attackers(AttackConfig(kind="scaling", share=0.25), 8, 1)
    good = [client for client in range(8) if client not in bad]
    made = experiment(blobs, {})
    name = next(key for key in made.state.model if key.endswith("weight"))
    honest, own = updates(made, name, good), updates(made, name, bad)
    if kind == "inner-product":
        sent = -2.0 * honest.mean(0).expand_as(own)
    elif kind == "alie":
        sent = (honest.mean(0) - 2.0 * honest.std(0, correction=0)).expand_as(own)
    else:
        sent = {"sign-flip": -2.0, "scaling": 2.0}[kind] * own
    expected = torch.cat([honest, sent]).mean(0)
    assert torch.allclose(moved(blobs, attack(kind, scale=2.0)), expected, atol=1e-6)


def test_the_hidden_deviations_of_alie() -> None:
    assert hidden_deviations(50, 24) == pytest.approx(1.426, abs=1e-3)
    assert hidden_deviations(10, 1) == 0.0  # too few attackers to need supporters: nothing hides
    assert math.isfinite(hidden_deviations(4, 3))


def test_anchor_poisoning_moves_one_row_and_a_median_restores_it(blobs: DataSet) -> None:
    settings = attack("anchor-poisoning", source=2, target=0, scale=50.0)
    clean, _ = one_round(experiment(blobs, {}, "fedfa"))
    hit, _ = one_round(experiment(blobs, settings, "fedfa"))
    cured, _ = one_round(experiment(blobs, {**settings, "aggregation": {"rule": "median"}}, "fedfa"))
    before, after = clean.components["anchors"]["anchors"], hit.components["anchors"]["anchors"]
    start = experiment(blobs, {}, "fedfa").state.components["anchors"]["anchors"].double()
    assert all(torch.equal(clean.model[name], value) for name, value in hit.model.items())  # the model is honest
    others = [0, 1, 3]
    assert torch.allclose(before[others], after[others], atol=1e-6)
    # Two of eight clients of (here) equal size send start + 50 (target − source) in that row.
    bad = attackers(AttackConfig(kind="anchor-poisoning", share=0.25), 8, 1)
    _, statistics = one_round(experiment(blobs, {}, "fedfa"))
    rows = []
    for result in statistics.results:
        entry = result.contribution["anchors/anchors"]
        row = entry.tensors["anchors"][2].double() / entry.weight.double()
        rows.append(start[2] + 50 * (start[0] - start[2]) if result.client in bad else row)
    assert torch.allclose(after[2].double(), torch.stack(rows).mean(0), atol=1e-4)
    assert float((after[2] - before[2]).norm()) > 10
    assert float((cured.components["anchors"]["anchors"] - before).norm()) < 0.5


def test_label_flips_change_the_attackers_labels_only(blobs: DataSet) -> None:
    federation = blobs.split("iid", clients=4, seed=1)
    changed = poisoned(federation, AttackConfig(kind="label-flip"), [2], seed=1)
    for client in range(4):
        expected = federation[client].labels
        assert torch.equal(changed[client].labels, 3 - expected if client == 2 else expected)
    assert changed.dataset.test is federation.dataset.test
    assert torch.equal(federation.dataset.train.labels, blobs.train.labels)


def test_a_backdoor_patches_half_of_the_attackers_pictures() -> None:
    federation = load("digits").split("iid", clients=5, seed=1)
    changed = poisoned(federation, AttackConfig(kind="backdoor", target=7), [1, 3], seed=1)
    for client in range(5):
        old, new = (one.dataset.train.inputs[one[client].positions] for one in (federation, changed))
        differs = (old != new).flatten(1).any(1)
        if client not in (1, 3):
            assert not differs.any()
            assert torch.equal(federation[client].labels, changed[client].labels)
            continue
        marked = (new[:, -2:, -2:] == 255).flatten(1).all(1)
        assert int(marked.sum()) == -(-federation[client].size // 2)
        assert bool((changed[client].labels[marked] == 7).all())
        assert torch.equal(changed[client].labels[~marked], federation[client].labels[~marked])
    test = triggered(federation.dataset, 7)
    assert len(test) == int((federation.dataset.test.labels != 7).sum())
    assert bool((test.labels == 7).all())
    assert torch.equal(patched(federation.dataset, test.inputs), test.inputs)


def test_attacks_that_do_not_fit_are_refused(blobs: DataSet) -> None:
    with pytest.raises(ConfigError, match="not pictures"):
        _ = experiment(blobs, attack("backdoor")).clients
    with pytest.raises(ConfigError, match="anchors or prototypes"):
        experiment(blobs, attack("anchor-poisoning"))
    with pytest.raises(ConfigError, match="counted from 0 to 3"):
        experiment(blobs, attack("anchor-poisoning", source=4), "fedfa")
    with pytest.raises(ConfigError, match="no clients that could attack"):
        experiment(blobs, attack("sign-flip"), "centralised")
    with pytest.raises(ConfigError, match="sites are real"):
        RunConfig({"preset": "digits-c2", "settings": "attack.kind=sign-flip"}).config(3)


def test_a_sign_flip_hurts_the_mean_and_a_trimmed_mean_bears_it(blobs: DataSet) -> None:
    def accuracy(settings: dict[str, object]) -> float:
        made = experiment(blobs, settings, local=LocalTraining(epochs=3, batch_size=8, lr=0.2))
        return [record.accuracy or 0.0 for record in made.rounds(5, progress=False)][-1]

    hostile = attack("sign-flip", scale=10.0)
    assert accuracy({}) > 0.9
    assert accuracy(hostile) < 0.5
    for rule in ("trimmed-mean", "multi-krum", "centred-clipping"):
        assert accuracy({**hostile, "aggregation": {"rule": rule, "attackers": 0.25}}) > 0.85, rule
