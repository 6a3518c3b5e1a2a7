"""FedFA's last calibration, against the same thing computed plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fedfa.algorithms.registry import build_algorithm
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import load_tensors
from fedfa.experiment.finalize import finalize
from fedfa.experiment.run import run
from fedfa.learning.context import Role, Task
from fedfa.models.split import SplitModel
from tests.experiment.run_toys import assert_same_run, small


def test_anchors_are_the_class_means_of_the_final_network_and_the_classifier_descends_on_them(
    tmp_path: Path, blobs: DataSet
) -> None:
    """The classifier after n steps of gradient descent on the mean cross-entropy of the C exact class means.

    Everything below the classifier, and every round before, is that of the run without it.
    """
    before = run(small("fedfa"), tmp_path / "without", data=blobs)
    steps, lr = 30, 0.5
    with_it = small("fedfa", algorithm={"final": {"steps": steps, "lr": lr}})
    after = run(with_it, tmp_path / "with", data=blobs)
    network = Experiment.from_config(small("fedfa"), data=blobs).task.model
    network.load(before.model)
    network.module.eval()
    with torch.no_grad():
        features, _ = network(blobs.normalisation.batch(blobs.train.inputs))
    y = blobs.train.labels
    means = torch.stack([features[y == c].double().mean(0) for c in range(4)])
    found = load_tensors(tmp_path / "with" / "server.safetensors")["anchors/anchors"]
    torch.testing.assert_close(found, means.float())

    weight = before.model[network.head_tensors[0]].double().requires_grad_()
    bias = before.model[network.head_tensors[1]].double().requires_grad_()
    for _ in range(steps):
        loss = functional.cross_entropy(means @ weight.T + bias, torch.arange(4))
        gradients = torch.autograd.grad(loss, [weight, bias])
        weight, bias = ((p - lr * g).detach().requires_grad_() for p, g in zip((weight, bias), gradients, strict=True))
    expected = dict(zip(network.head_tensors, (weight.detach().float(), bias.detach().float()), strict=True))
    for name, value in after.model.items():
        torch.testing.assert_close(value, expected.get(name, before.model[name]))
    assert [record["accuracy"] for record in after.metrics[:-1]] == [record["accuracy"] for record in before.metrics]
    assert after.metrics[-1]["final_pass"]
    assert after.metrics[-1]["round"] == 5
    assert after.metrics[-1]["bytes_up"] == 6 * (4 * 8 + 4) * 8, "C·d sums and C counts of 8 bytes from each client"


def test_a_finished_run_can_have_it_afterwards(tmp_path: Path, blobs: DataSet) -> None:
    run(small("fedfa"), tmp_path / "trained", data=blobs)
    options = {"algorithm": {"final": {"steps": 10}}}
    finalize(tmp_path / "trained", None, tmp_path / "after", options, data=blobs)
    run(small("fedfa", algorithm={"final": {"steps": 10}}), tmp_path / "whole", data=blobs)
    assert_same_run(tmp_path / "after", tmp_path / "whole")


def test_it_is_off_by_default_and_on_in_plus(tmp_path: Path, blobs: DataSet) -> None:
    assert not small("fedfa").build_algorithm().has_final_pass
    assert small("fedfa", algorithm={"variant": "plus"}).build_algorithm().has_final_pass
    result = run(small("fedfa"), tmp_path / "run", data=blobs)
    assert not any("final_pass" in record for record in result.metrics)


def test_a_fixed_classifier_is_refused() -> None:
    model = SplitModel.of(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    model.head.weight.requires_grad_(False)
    options: dict[str, dict[str, object]] = {"calibration": {"when": "never"}, "final": {"steps": 3}}
    with pytest.raises(
        AlgorithmError, match=r"'final' trains the classifier, but '0.weight' is frozen; leave out 'final'"
    ):
        build_algorithm("fedfa", options).with_roles(Task(model, 2, 1, 1))
    off = build_algorithm("fedfa", {"calibration": {"when": "never"}}).with_roles(Task(model, 2, 1, 1))
    assert off.roles["0.weight"] is Role.FROZEN
