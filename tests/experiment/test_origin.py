"""A run goes on only with what it was started with; networks of all kinds resume to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedfa.data import DataSet
from fedfa.errors import DataError, ModelError, RunError
from fedfa.experiment.build import origin_of
from fedfa.experiment.files import load_tensors, save_tensors
from fedfa.experiment.recorded_runs import find_runs
from fedfa.experiment.run import run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.models import SplitModel
from fedfa.report.html.commands import command_of
from tests.conftest import make_blobs
from tests.experiment.run_toys import STATEFUL, assert_same_run, equal_tensors, forget_digests, small


class PlugPulledError(Exception):
    """Stands for a process that ends in the middle."""


def pull_the_plug(record: dict[str, object]) -> None:
    if record["round"] == 2:
        raise PlugPulledError


def half_a_run(out: Path, data: DataSet, algorithm: str = "fedfa") -> None:
    with pytest.raises(PlugPulledError):
        run(small(algorithm, rounds=4), out, data=data, model=tanh_network, watch=pull_the_plug)


def tanh_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def relu_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def test_another_network_of_the_same_shapes_is_refused(tmp_path: Path, blobs: DataSet) -> None:
    half_a_run(tmp_path / "run", blobs)
    with pytest.raises(RunError, match="cannot continue: network changed"):
        run(small(rounds=4), tmp_path / "run", data=blobs, model=relu_network, resume=True)
    assert run(small(rounds=4), tmp_path / "run", data=blobs, model=tanh_network, resume=True).metrics[-1]["round"] == 4


def test_a_refused_longer_run_leaves_the_finished_one_as_it_was(tmp_path: Path, blobs: DataSet) -> None:
    done = run(small(rounds=2), tmp_path / "run", data=blobs, model=tanh_network)
    before = {file.name: file.read_bytes() for file in done.directory.iterdir() if file.is_file()}
    with pytest.raises(RunError, match="network changed"):
        run(small(rounds=4), tmp_path / "run", data=blobs, model=relu_network, resume=True)
    assert {file.name: file.read_bytes() for file in done.directory.iterdir() if file.is_file()} == before
    whole = run(small(rounds=4), tmp_path / "whole", data=blobs, model=tanh_network)
    longer = run(small(rounds=4), tmp_path / "run", data=blobs, model=tanh_network, resume=True)
    assert_same_run(longer.directory, whole.directory)


def test_what_was_given_in_python_is_not_recorded_under_another_name(tmp_path: Path, blobs: DataSet) -> None:
    """The record of a network or data that no config can name says so, and cannot be run as if it were complete."""

    def nameless() -> nn.Module:
        return tanh_network()

    directory = run(small(rounds=1), tmp_path / "run", data=blobs, model=nameless).directory
    recorded = RunDirectory(directory).config()
    assert (recorded.model.name, recorded.model.options, recorded.data.name) == ("own", {}, "own")
    with pytest.raises(DataError, match=r"given in Python.*data=…"):
        run(recorded, tmp_path / "again")
    with pytest.raises(ModelError, match=r"given in Python.*model=…"):
        run(recorded, tmp_path / "again", data=blobs)
    same = run(recorded, tmp_path / "same", data=blobs, model=nameless)
    assert_same_run(same.directory, directory)
    command = command_of(find_runs([directory]).runs[0])
    assert command.startswith("fedfa.run(")
    assert "model=…, data=…" in command


def test_a_network_of_a_module_is_recorded_by_its_name(tmp_path: Path, blobs: DataSet) -> None:
    directory = run(small(rounds=1), tmp_path / "run", data=blobs, model=tanh_network).directory
    recorded = RunDirectory(directory).config()
    assert (recorded.model.name, recorded.model.options) == ("tests.experiment.test_origin:tanh_network", {})
    assert_same_run(run(recorded, tmp_path / "same", data=blobs).directory, directory)


def test_data_come_in_any_form(tmp_path: Path, blobs: DataSet) -> None:
    x, y = blobs.train.inputs, blobs.train.labels
    np.savez(tmp_path / "mine.npz", x=x.numpy(), y=y.numpy())
    forms = [(x.numpy(), y.numpy()), TensorDataset(x, y), tmp_path / "mine.npz", str(tmp_path / "mine.npz")]
    found = [run(small(rounds=1), tmp_path / str(n), data=data).final_accuracy for n, data in enumerate(forms)]
    assert len(set(found)) == 1
    with pytest.raises(DataError, match="cannot make a data set of int"):
        run(small(rounds=1), tmp_path / "no", data=3)


def test_other_data_are_refused(tmp_path: Path, blobs: DataSet) -> None:
    half_a_run(tmp_path / "run", blobs)
    other = replace(make_blobs(), fingerprint="other")
    with pytest.raises(RunError, match="data changed"):
        run(small(rounds=4), tmp_path / "run", data=other, model=tanh_network, resume=True)


def test_an_edited_method_is_refused(tmp_path: Path, blobs: DataSet) -> None:
    method = tmp_path / "method.py"
    method.write_text(Path(STATEFUL).read_text(encoding="utf-8"), encoding="utf-8")
    half_a_run(tmp_path / "run", blobs, str(method))
    method.write_text(method.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    with pytest.raises(RunError, match=r"method method\.py changed"):
        run(small(str(method), rounds=4), tmp_path / "run", data=blobs, model=tanh_network, resume=True)


def test_settings_that_cannot_change_a_result_may_differ(tmp_path: Path, blobs: DataSet) -> None:
    half_a_run(tmp_path / "run", blobs)
    other = small(rounds=4, checkpoint={"every": 2}, data={"clients": 6, "partition": "shards:2", "offline": True})
    assert len(run(other, tmp_path / "run", data=blobs, model=tanh_network, resume=True).metrics) == 4


def test_a_network_itself_can_be_given_and_stays_as_it_is(tmp_path: Path, blobs: DataSet) -> None:
    network = tanh_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    result = run(small(rounds=1), tmp_path / "run", data=blobs, model=network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not torch.equal(result.model["0.weight"], before["0.weight"])


class Odd(nn.Module):
    """Tied weights, a mask, and a memory that the network itself would not save."""

    mask: Tensor
    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([True, True, True, True, True, False]))
        self.register_buffer("memory", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.second(torch.relu(self.first(x)))) * self.mask
        if self.training:
            self.memory += h.detach().mean(0)
        logits: Tensor = self.head(h + 0.01 * self.memory)
        return logits


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_tied_weights_masks_and_unsaved_buffers_train_and_resume_bit_by_bit(
    tmp_path: Path, blobs: DataSet, buffers: str
) -> None:
    config = small(rounds=4, model={"name": "mlp", "buffers": buffers})
    run(config, tmp_path / "whole", data=blobs, model=Odd)
    with pytest.raises(PlugPulledError):
        run(config, tmp_path / "stopped", data=blobs, model=Odd, watch=pull_the_plug)
    stopped = run(config, tmp_path / "stopped", data=blobs, model=Odd, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert stopped.model["mask"].tolist() == [True] * 5 + [False]
    assert "second.weight" not in stopped.model, "a tensor with two names comes once"


def test_a_run_begun_before_cohorts_were_rounded_down_keeps_its_cohorts(tmp_path: Path, blobs: DataSet) -> None:
    """Its config says nothing of the rounding: 0.25 · 6 clients were two, and int would make them one."""
    asked = {"algorithm": {"variant": "authors"}, "cohort": {"clients": None, "rate": 0.25}}
    old = small("fedavg", **asked, rounds=4)
    assert old.cohort.count(6) == 1
    old = old.model_copy(update={"cohort": old.cohort.model_copy(update={"rounding": "nearest"})})
    whole = run(old, tmp_path / "whole", data=blobs)
    with pytest.raises(PlugPulledError):
        run(old, tmp_path / "run", data=blobs, watch=pull_the_plug)
    forget_digests(tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace('rounding = "nearest"\n', ""))
    directory = RunDirectory(tmp_path / "run")
    assert directory.config().cohort.count(6) == 2
    done = run(directory.config(), tmp_path / "run", data=blobs, resume=True)
    assert [record["cohort"] for record in done.metrics] == [record["cohort"] for record in whole.metrics]
    assert len(done.metrics[-1]["cohort"]) == 2


def test_a_run_with_the_former_constants_of_cifar10_is_refused(tmp_path: Path, blobs: DataSet) -> None:
    """Its fingerprints lack the constants of the reference code, which were corrected; other data sets go on."""
    config = small("fedavg", algorithm={"variant": "authors"})
    named, other = (blobs_named(blobs, name) for name in ("cifar10", "fashion-mnist"))
    network = SplitModel.of(tanh_network())
    now = origin_of(config, named, network)
    former = {key: value for key, value in now.items() if key != "normalisation"}
    assert (
        former.keys() == origin_of(config, other, network).keys() == origin_of(small("fedavg"), named, network).keys()
    )
    directory = RunDirectory(tmp_path)
    directory.check_origin(former)
    with pytest.raises(RunError, match="normalisation changed"):
        directory.check_origin(now)


def blobs_named(blobs: DataSet, name: str) -> DataSet:
    return replace(blobs, name=name)


def test_a_run_of_a_method_by_its_former_name_goes_on(tmp_path: Path, blobs: DataSet) -> None:
    """`fedma` is now `matching`: in the expression, in the options and in the checkpoint's names."""
    config = small("fedma", algorithm={"fedma": {"weighting": "uniform"}}, rounds=4)
    assert config == small("matching", algorithm={"matching": {"weighting": "uniform"}}, rounds=4)
    run(config, tmp_path / "whole", data=blobs)
    with pytest.raises(PlugPulledError):
        run(config, tmp_path / "run", data=blobs, watch=pull_the_plug)
    forget_digests(tmp_path / "run")
    for name in ("config.toml", "checkpoint.safetensors"):
        file = tmp_path / "run" / name
        if name == "config.toml":
            file.write_text(file.read_text().replace("matching", "fedma"))
        else:
            tensors = load_tensors(file)
            save_tensors(file, {key.replace("matching", "fedma"): value for key, value in tensors.items()})
            assert any("fedma" in key for key in load_tensors(file))
    directory = RunDirectory(tmp_path / "run")
    state = directory.saved()
    assert state is not None
    assert state.components["matching"].keys() == {"fc1.0", "head"}
    run(directory.config(), tmp_path / "run", data=blobs, resume=True)
    for name in ("server.safetensors", "checkpoint.safetensors"):
        assert equal_tensors(load_tensors(tmp_path / "whole" / name), load_tensors(tmp_path / "run" / name))
