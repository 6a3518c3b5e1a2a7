"""The public API: experiments that are built, trained, inspected, saved and loaded from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn

import fedfa
from fedfa.algorithms import FedAdam, FedAvg, FedFA, FedProx, Scaffold
from fedfa.data import DataSet, Federation
from fedfa.errors import AlgorithmError, ConfigError, DataError, FedfaError, ModelError, RunError
from fedfa.experiment.record import RoundRecord
from fedfa.learning.tensors import Tensors, flatten
from fedfa.models.split import SplitModel
from tests.engines.engine_toys import needs_fork
from tests.experiment.run_toys import TIMES, equal_tensors, timeless


class Network(nn.Module):
    """With BatchNorm, so that there are buffers and FedBN has layers to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.body(x)).relu())
        return result


@pytest.fixture
def data(blobs: DataSet) -> Federation:
    return blobs.split("shards:2", 6, seed=1)


def experiment(data: Federation, algorithm: Any = "fedavg", **more: Any) -> fedfa.Experiment:
    local = fedfa.LocalTraining(epochs=2, batch_size=10, lr=0.1)
    return fedfa.Experiment(
        algorithm, data=data, **{"model": Network, "cohort": 3, "local": local, "workers": 1, **more}
    )


def trained(experiment: fedfa.Experiment, *counts: int) -> fedfa.Experiment:
    for count in counts:
        list(experiment.rounds(count))
    return experiment


def everything(experiment: fedfa.Experiment) -> Tensors:
    """Server state and client states."""
    own = {
        f"{client}/{name}": value
        for client in range(6)
        for name, value in flatten(experiment.client_states.load(client)).items()
    }
    return {**experiment.state.to_tensors(), **experiment.final_state.to_tensors(), **own}


def records(experiment: fedfa.Experiment) -> list[dict[str, Any]]:
    """Without times."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in experiment.records]


def assert_same(a: fedfa.Experiment, b: fedfa.Experiment) -> None:
    assert equal_tensors(everything(a), everything(b))
    assert records(a) == records(b)


def assert_same_directories(a: Path, b: Path, data: Federation) -> None:
    """The same tensors, records, files and summary."""
    assert_same(*(fedfa.load(path, model=Network, data=data) for path in (a, b)))
    assert {file.name for file in a.iterdir()} == {file.name for file in b.iterdir()}
    summaries = [json.loads((path / "summary.json").read_text()) for path in (a, b)]
    times = {"seconds", "cpu_seconds", "commit", "record", "digest"}  # and digests of files with times
    first, second = ({key: value for key, value in one.items() if key not in times} for one in summaries)
    assert first == second


# -- a notebook -------------------------------------------------------------------------------------------------------
NOTEBOOK = """
import sys

import torch
from torch import nn

import fedfa
from fedfa.algorithms import FedAdam, FedFA


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))
"""
TRAIN = """
data = fedfa.data.load("digits").split("shards:2", clients=20, seed=0)
experiment = fedfa.Experiment(
    algorithm=FedFA(mu=0.1) + FedAdam(lr=0.01),
    data=data,
    model=Net,
    cohort=10,
    local=fedfa.LocalTraining(epochs=2, batch_size=16, lr=0.05),
)
for record in experiment.rounds(50):
    if record.accuracy > 0.4:
        break
assert record.accuracy > 0.4 and record.round < 50, record

test = data.dataset.test
model = experiment.model()
assert type(model) is Net and not model.training
assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
with torch.no_grad():
    answers = model(data.dataset.normalisation.batch(test.inputs)).argmax(1)
assert (answers == test.labels).double().mean().item() == record.accuracy
assert torch.equal(experiment.predict(test.inputs), answers)
assert experiment.predict(test.inputs[0]).tolist() == answers[:1].tolist()
assert experiment.predict(test.inputs[:3], scores=True).shape == (3, 10)

import os
assert os.listdir() == [], "something was written"
experiment.save(sys.argv[1])
"""
CONTINUE = """
for record in experiment.rounds(2):
    pass
digest = [experiment.state.to_tensors(), [record.accuracy for record in experiment.records]]
print({name: value.double().sum().item().hex() for name, value in sorted(digest[0].items())}, digest[1])
"""
LOAD = "experiment = fedfa.load(sys.argv[1], model=Net)\n"


@pytest.mark.system
def test_a_notebook_trains_predicts_saves_and_continues_in_another_process(data_dir: Path, tmp_path: Path) -> None:
    """Nothing is written before it is asked for: the scripts run in an empty directory."""
    (tmp_path / "cwd").mkdir()
    environment = {**os.environ, "FEDFA_DATA": str(data_dir), "HOME": str(tmp_path / "cwd")}

    def python(script: str) -> str:
        command = [sys.executable, "-c", script, str(tmp_path / "run")]
        done = subprocess.run(
            command, cwd=tmp_path / "cwd", env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    same_process = python(NOTEBOOK + TRAIN + CONTINUE)
    assert same_process
    assert python(NOTEBOOK + LOAD + CONTINUE) == same_process
    assert list((tmp_path / "cwd").iterdir()) == []


# -- rounds -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=needs_fork)])
@pytest.mark.parametrize(
    "algorithm", [FedFA(mu=0.2) + FedAdam(), Scaffold(), "fedbn"], ids=["fedfa", "scaffold", "fedbn"]
)
def test_rounds_can_be_made_in_portions(data: Federation, algorithm: Any, workers: int) -> None:
    portions = trained(experiment(data, algorithm, workers=workers), 2, 3)
    assert_same(portions, trained(experiment(data, algorithm), 5))
    assert [record.round for record in portions.records] == [1, 2, 3, 4, 5]


def test_a_loop_that_is_left_can_be_continued(data: Federation) -> None:
    left = experiment(data, Scaffold())
    for record in left.rounds(10):
        if record.round == 2:
            break
    assert left.state.round == 2
    assert_same(trained(left, 3), trained(experiment(data, Scaffold()), 5))


class Interrupting(fedfa.Component):
    """Raises KeyboardInterrupt once, when client 4 begins round 3."""

    raised: ClassVar[bool] = False

    def begin(self, ctx: fedfa.ClientContext) -> None:
        if ctx.round == 2 and ctx.client == 4 and not type(self).raised:
            type(self).raised = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("saved", [False, True])
def test_a_round_interrupted_among_its_clients_is_trained_again(
    data: Federation, tmp_path: Path, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of clients that had finished are those before the round: Ctrl-C in a notebook changes no bit."""
    monkeypatch.setattr(Interrupting, "raised", False)
    algorithm = Scaffold() + Interrupting()
    found = trained(experiment(data, algorithm, cohort=6), 2)
    if saved:  # client states of a directory, which later ones in memory replace
        found.save(tmp_path / "run")
        found = fedfa.load(tmp_path / "run", algorithm=algorithm, data=data, model=Network)
    before = everything(found)
    with pytest.raises(KeyboardInterrupt):
        trained(found, 3)
    assert Interrupting.raised
    assert equal_tensors(everything(found), before)
    assert_same(trained(found, 3), trained(experiment(data, algorithm, cohort=6), 5))


def test_a_round_whose_callback_fails_is_trained_again(data: Federation) -> None:
    def fail_once(experiment: fedfa.Experiment, record: RoundRecord) -> None:
        if record.round == 2 and record.final_pass is False and not failed:
            failed.append(record.round)
            raise ValueError("not yet")

    failed: list[int] = []
    found = experiment(data, Scaffold(), callbacks=[fail_once])
    with pytest.raises(ValueError, match="not yet"):
        trained(found, 4)
    assert (found.state.round, len(found.records)) == (1, 1)
    assert_same(trained(found, 3), trained(experiment(data, Scaffold()), 4))


def test_a_run_in_a_directory_is_the_same_training(data: Federation, tmp_path: Path) -> None:
    here = trained(experiment(data, Scaffold()), 4)
    result = fedfa.run(here.config, tmp_path / "run", data=data, model=Network)
    assert equal_tensors(result.model, here.state.model)
    assert json.loads(json.dumps(records(here))) == timeless(tmp_path / "run")
    here.save(tmp_path / "saved")
    assert_same_directories(tmp_path / "run", tmp_path / "saved", data)


def test_evaluation_every_few_rounds_and_always_at_the_end(data: Federation) -> None:
    few = trained(experiment(data, evaluate_every=2), 5)
    assert [record.accuracy is not None for record in few.records] == [False, True, False, True, True]


def test_a_network_object_gives_the_initial_weights_and_is_not_changed(data: Federation) -> None:
    network = Network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    own = trained(experiment(data, model=network), 1)
    assert equal_tensors(dict(network.state_dict()), before)
    assert not equal_tensors(own.weights(), before)
    fresh = experiment(data, model=network)
    assert equal_tensors(fresh.state.model, before)


# -- callbacks --------------------------------------------------------------------------------------------------------
def test_callbacks_add_values_stop_and_change_the_learning_rate(data: Federation) -> None:
    def largest(experiment: fedfa.Experiment, record: RoundRecord) -> Mapping[str, Any]:
        return {"largest": max(float(value.abs().max()) for value in experiment.state.model.values())}

    def schedule(experiment: fedfa.Experiment, record: RoundRecord) -> None:
        assert record["largest"] > 0, "later callbacks see what earlier ones added"
        if record.round == 2:
            experiment.local = experiment.local.model_copy(update={"lr": 0.01})
        if record.round == 3:
            experiment.stop()

    found = trained(experiment(data, callbacks=[largest, schedule]), 10)
    assert [record.round for record in found.records] == [1, 2, 3]
    assert [record.learning_rate for record in found.records] == [0.1, 0.1, 0.01]
    assert all(record.largest > 0 for record in found.records)
    assert [record.round for record in found.rounds(1)] == [4], "a stop counts for one call"


def test_callbacks_of_a_run_are_recorded(data: Federation, tmp_path: Path) -> None:
    def stop(experiment: fedfa.Experiment, record: RoundRecord) -> Mapping[str, Any]:
        if record.round == 2:
            experiment.stop()
        return {"twice": 2 * record.round}

    config = trained(experiment(data), 4).config
    result = fedfa.run(config, tmp_path / "run", data=data, model=Network, callbacks=[stop])
    assert [line["twice"] for line in timeless(tmp_path / "run")] == [2, 4]
    assert (result.summary["rounds"], result.summary["planned_rounds"]) == (2, 4)


# -- the final pass ---------------------------------------------------------------------------------------------------
def test_training_continues_from_before_the_final_pass(data: Federation, tmp_path: Path) -> None:
    found = experiment(data, "fedavg+ccvr")
    made = list(found.rounds(3))
    assert [record.final_pass for record in made] == [False, False, False, True]
    plain = trained(experiment(data), 3)
    assert equal_tensors(found.state.model, plain.state.model)
    assert not equal_tensors(found.weights(), plain.weights())
    assert found.predict(data.dataset.test.inputs).tolist() == predictions(found.model(), data)
    found.save(tmp_path / "run")
    loaded = fedfa.load(tmp_path / "run", model=Network, data=data)
    assert_same(loaded, found)
    for each in (found, loaded):
        assert_same(trained(each, 2), trained(experiment(data, "fedavg+ccvr"), 5))
        assert [record.round for record in each.records] == [1, 2, 3, 4, 5, 6]


def predictions(model: nn.Module, data: Federation) -> list[int]:
    with torch.no_grad():
        found: list[int] = model(data.dataset.normalisation.batch(data.dataset.test.inputs)).argmax(1).tolist()
    return found


# -- models -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["local", "fedbn"])
def test_where_clients_keep_tensors_a_client_must_be_named(data: Federation, algorithm: str) -> None:
    found = trained(experiment(data, algorithm), 1)
    for use in (found.model, found.weights, lambda: found.predict(data.dataset.test.inputs)):
        with pytest.raises(RunError, match=rf"'{algorithm}' every client keeps .*experiment\.model\(client=0\)"):
            use()
    client, other = found.records[-1].cohort[:2]
    assert not equal_tensors(found.weights(client), found.weights(other))
    answers = predictions(found.model(client), data)
    assert found.predict(data.dataset.test.inputs, client=client).tolist() == answers
    correct = sum(a == b for a, b in zip(answers, data.dataset.test.labels.tolist(), strict=True))
    assert found.records[-1]["client_accuracy"][str(client)] == pytest.approx(correct / len(answers))
    with pytest.raises(RunError, match=r"no client 6; .*0 to 5"):
        found.model(client=6)


def test_a_model_is_a_copy_without_hooks(data: Federation) -> None:
    found = trained(experiment(data, FedFA()), 1)
    model = found.model()
    assert type(model) is Network
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    trained(found, 1)
    assert_same(found, trained(experiment(data, FedFA()), 2))


def test_a_forward_hook_of_the_user_stays(data: Federation) -> None:
    network = Network()
    network.body.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    found = trained(experiment(data, model=network), 1)
    (hook,) = found.model().get_submodule("body")._forward_hooks.values()
    assert not SplitModel.is_own_hook(hook)


# -- schedules over all rounds ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("planned", [3, None])
def test_more_rounds_than_planned_are_refused_where_a_schedule_needs_them(
    data: Federation, planned: int | None
) -> None:
    found = experiment(data, "fedproc", planned_rounds=planned)
    if planned is not None:
        with pytest.raises(ConfigError, match=r"'fedproc' follows a schedule over 3 rounds and cannot train 4"):
            found.rounds(4)
    trained(found, 3)
    with pytest.raises(ConfigError, match=r"start a new experiment with planned_rounds=4"):
        found.rounds(1)


def test_planned_rounds_can_be_made_in_portions(data: Federation) -> None:
    portions = trained(experiment(data, "fedproc", planned_rounds=4), 1, 3)
    assert_same(portions, trained(experiment(data, "fedproc"), 4))
    assert list(portions.rounds()) == []


# -- files ------------------------------------------------------------------------------------------------------------
def test_a_run_is_overwritten_only_if_that_is_asked_for(data: Federation, tmp_path: Path) -> None:
    first, second = trained(experiment(data), 2), trained(experiment(data, seed=2), 1)
    assert first.save(tmp_path / "run") == tmp_path / "run"
    with pytest.raises(RunError, match=r"holds a run already; .*overwrite=True"):
        second.save(tmp_path / "run")
    assert equal_tensors(fedfa.load(tmp_path / "run", model=Network, data=data).weights(), first.weights())
    second.save(tmp_path / "run", overwrite=True)
    assert_same(fedfa.load(tmp_path / "run", model=Network, data=data), second)


def test_a_loaded_experiment_can_be_saved_where_it_came_from(data: Federation, tmp_path: Path) -> None:
    trained(experiment(data, Scaffold()), 2).save(tmp_path / "run")
    for _ in range(2):
        loaded = trained(fedfa.load(tmp_path / "run", model=Network, data=data), 1)
        with pytest.raises(RunError, match="holds a run already"):
            loaded.save(tmp_path / "run")
        loaded.save(tmp_path / "run", overwrite=True)
    whole = trained(experiment(data, Scaffold()), 4)
    assert_same(fedfa.load(tmp_path / "run", model=Network, data=data), whole)
    assert_same(trained(loaded, 1), trained(whole, 1))


def test_loading_only_reads(data: Federation, tmp_path: Path) -> None:
    trained(experiment(data, Scaffold()), 2).save(tmp_path / "run")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    trained(fedfa.load(tmp_path / "run", model=Network, data=data), 2)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_saved_experiment_can_be_resumed_as_a_run(data: Federation, tmp_path: Path) -> None:
    found = trained(experiment(data, Scaffold()), 2)
    found.save(tmp_path / "run")
    config = trained(found, 2).config
    fedfa.run(config, tmp_path / "run", data=data, model=Network, resume=True)
    fedfa.run(config, tmp_path / "whole", data=data, model=Network)
    assert_same_directories(tmp_path / "run", tmp_path / "whole", data)


def test_predictions_of_a_saved_model_need_no_data(data: Federation, tmp_path: Path) -> None:
    found = trained(experiment(data), 2)
    found.save(tmp_path / "run")
    loaded = fedfa.load(tmp_path / "run")
    inputs = data.dataset.test.inputs
    assert torch.equal(loaded.predict(inputs, scores=True), found.predict(inputs, scores=True))
    assert loaded.preprocessing.classes == ("a", "b", "c", "d")
    with pytest.raises(DataError, match=r"data of this run were given in Python .*fedfa\.load\(path, data=…\)"):
        list(loaded.rounds(1))


def test_a_network_without_a_name_must_be_given_again(data: Federation, tmp_path: Path) -> None:
    found = trained(experiment(data, model=lambda: Network()), 1)
    found.save(tmp_path / "run")
    with pytest.raises(ModelError, match=r"network of this run was given in Python .*fedfa\.load\(path, model=…\)"):
        fedfa.load(tmp_path / "run", data=data).model()
    assert_same(fedfa.load(tmp_path / "run", model=Network, data=data), found)


def test_a_directory_of_an_earlier_release_loads(data: Federation, tmp_path: Path) -> None:
    """Without preprocessing.json, inputs are prepared as the data set says."""
    found = trained(experiment(data), 2)
    found.save(tmp_path / "run")
    (tmp_path / "run" / "preprocessing.json").unlink()
    loaded = fedfa.load(tmp_path / "run", model=Network, data=data)
    inputs = data.dataset.test.inputs
    assert torch.equal(loaded.predict(inputs), found.predict(inputs))
    assert_same(trained(loaded, 1), trained(found, 1))


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run \(no config\.toml\)"):
        fedfa.load(tmp_path)


# -- short texts ------------------------------------------------------------------------------------------------------
def test_representations_are_short(data: Federation, tmp_path: Path) -> None:
    found = experiment(data, FedFA(mu=0.2) + FedAdam())
    assert repr(found) == "<Experiment fedfa+fedadam on own with 6 clients: 0 rounds>"
    record = next(iter(found.rounds(1)))
    assert repr(found) == f"<Experiment fedfa+fedadam on own with 6 clients: 1 rounds, accuracy {record.accuracy:.2%}>"
    assert repr(record).startswith(f"RoundRecord(round=1, accuracy={record.accuracy:.4f}, loss=")
    assert len(repr(record)) < 100
    result = fedfa.run(found.config, tmp_path / "run", data=data, model=Network)
    assert repr(result) == f"<RunResult {tmp_path / 'run'}: 1 records, final accuracy {result.final_accuracy:.2%}>"
    assert repr(FedFA(mu=0.2) + FedAdam()) == "Anchors(mu=0.2) + Calibration() + FinalCalibration() + FedAdam()"


def test_an_unknown_value_of_a_record_is_named_with_the_known_ones(data: Federation) -> None:
    record = trained(experiment(data), 1).records[0]
    assert record.bytes_up == record["bytes_up"] > 0
    with pytest.raises(AttributeError, match="no 'acuracy'; it has round, accuracy, loss"):
        record.acuracy  # noqa: B018  # the access is the test


# -- wrong arguments --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"data": [1, 2]}, DataError, r"data is a list; give a federation: fedfa\.data\.load\(NAME\)\.split"),
        ({"model": "mpl"}, ModelError, "unknown model 'mpl'.*did you mean 'mlp'"),
        ({"model": 3}, ModelError, "model is 3; give an nn.Module class, a function"),
        ({"model": lambda: nn.Linear(6, 3)}, ModelError, "3 outputs, but the data have 4 classes"),
        ({"cohort": 7}, ConfigError, r"the cohort has 7 clients, but only 6 of 6 hold samples"),
        ({"cohort": 1.5}, ConfigError, r"cohort\.rate = 1\.5"),
        ({"cohort": True}, ConfigError, "cohort = True: give a number of clients"),
        ({"cohort": "5"}, ConfigError, "cohort = '5': give a number of clients"),
        ({"local": {"lr": 0.1}}, ConfigError, r"local is \{'lr': 0\.1\}; give fedfa\.LocalTraining"),
        ({"callbacks": print}, ConfigError, "callbacks is <built-in function print>; give a list"),
        ({"callbacks": [3]}, ConfigError, r"callbacks is \[3\]; give a list of functions"),
        ({"algorithm": "fedavgg"}, AlgorithmError, "unknown method 'fedavgg'.*did you mean 'fedavg'"),
        ({"algorithm": 3}, AlgorithmError, "algorithm is 3; give an expression"),
        ({"evaluate_every": 0}, ConfigError, r"evaluation\.every = 0"),
        ({"workers": 0}, ConfigError, r"engine\.workers = 0"),
        ({"settings": {"locl": {}}}, ConfigError, r"unknown key locl \(did you mean 'local'"),
    ],
)
def test_wrong_arguments(data: Federation, arguments: dict[str, Any], kind: type[FedfaError], message: str) -> None:
    with pytest.raises(kind, match=message):
        experiment(**{"data": data, **arguments})


@pytest.mark.parametrize("count", [1.5, -1, "2", True])
def test_a_wrong_number_of_rounds(data: Federation, count: Any) -> None:
    found = experiment(data)
    with pytest.raises(ConfigError, match=r"rounds\(.*\): give the number of further rounds"):
        found.rounds(count)
    assert list(found.rounds(0)) == []
    assert len(list(found.rounds(cast("int", np.int64(1))))) == 1


def test_local_training_is_assigned_as_a_whole(data: Federation) -> None:
    with pytest.raises(ConfigError, match=r"local\.lr cannot be assigned; .*experiment\.local = fedfa"):
        experiment(data).local.lr = 0.5  # type: ignore[misc]  # the test is about it


def test_a_loop_cannot_be_given_other_local_training(data: Federation) -> None:
    with pytest.raises(ConfigError, match=r"local is \{'lr': 1\}"):
        experiment(data).local = {"lr": 1}  # type: ignore[assignment]  # the test is about it


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_other_files_is_left_alone(data: Federation, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="holds files that are no run"):
        trained(experiment(data), 1).save(tmp_path, overwrite=overwrite)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_local_training_changed_by_a_copy_is_checked(data: Federation) -> None:
    """pydantic's model_copy takes any name and any value."""
    found = experiment(data)
    for update in ({"learning_rate": 0.5}, {"lr": -5.0}):
        with pytest.raises(ConfigError, match=r"local\.(learning_rate|lr)"):
            found.local = found.local.model_copy(update=update)


def test_a_callback_cannot_train(data: Federation) -> None:
    found = experiment(data, callbacks=[lambda experiment, _: list(experiment.rounds(1)) and None])
    with pytest.raises(RunError, match="start further rounds after it, not in a callback"):
        trained(found, 2)
    assert found.state.round == 0
    found.callbacks.clear()
    assert [record.round for record in found.rounds(1)] == [1]


def test_another_algorithm_than_the_runs_is_not_loaded(data: Federation, tmp_path: Path) -> None:
    trained(experiment(data, FedFA(mu=0.2)), 1).save(tmp_path / "run")
    for other in (FedFA(mu=5.0), FedProx(mu=1), FedFA(mu=0.2) + FedAdam()):
        with pytest.raises(RunError, match=r"was trained with .*, not with .*leave out `algorithm`"):
            fedfa.load(tmp_path / "run", algorithm=other, data=data, model=Network)
    for same in (FedFA(mu=0.2), None):
        assert fedfa.load(tmp_path / "run", algorithm=same, data=data, model=Network).state.round == 1


class Scaled(fedfa.Component):
    """Scales the loss."""

    factor: float = 0.5

    def loss(self, ctx: fedfa.ClientContext, batch: fedfa.Batch, loss: torch.Tensor) -> torch.Tensor:
        return self.factor * loss


def test_a_component_class_is_loaded_with_the_options_of_the_run(data: Federation, tmp_path: Path) -> None:
    found = trained(experiment(data, Scaled(factor=0.25)), 1)
    found.save(tmp_path / "run")
    loaded = fedfa.load(tmp_path / "run", algorithm=Scaled, data=data, model=Network)
    assert_same(trained(loaded, 1), trained(found, 1))


def test_other_data_than_the_runs_are_not_loaded(data: Federation, tmp_path: Path) -> None:
    trained(experiment(data), 1).save(tmp_path / "own")
    other = replace(data.dataset, fingerprint="other").split("shards:2", 6, seed=1)
    with pytest.raises(RunError, match="was trained with other samples; give the data"):
        fedfa.load(tmp_path / "own", data=other, model=Network)
    digits = fedfa.data.load("digits")
    named = fedfa.Experiment("fedavg", data=digits.split("shards:2", clients=6, seed=0), model="mlp", cohort=2)
    trained(named, 1).save(tmp_path / "named")
    with pytest.raises(RunError, match=r"was trained with data\.seed = 0, not 9"):
        fedfa.load(tmp_path / "named", data=digits.split("shards:2", clients=6, seed=9))
    assert fedfa.load(tmp_path / "named", data=digits.split("shards:2", clients=6, seed=0)).state.round == 1


def test_wrong_options() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.anchors\.mu = -1"):
        FedFA(mu=-1)
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.fedprox\.muu \(did you mean 'mu'"):
        FedProx(muu=1)  # type: ignore[call-arg]  # the test is about it
    with pytest.raises(ConfigError, match=r"local\.lr = 0"):
        fedfa.LocalTraining(lr=0)
    with pytest.raises(AlgorithmError, match="two components are named 'fedprox'"):
        FedProx(mu=1) + FedProx(mu=2)
    with pytest.raises(ConfigError, match=r"algorithm\.fedavg\.weighting = 'size'"):
        FedAvg(weighting="size")


class Halve(fedfa.Component):
    """Halves the loss."""

    def loss(self, ctx: fedfa.ClientContext, batch: fedfa.Batch, loss: torch.Tensor) -> torch.Tensor:
        return loss / 2


LOAD_HALVE = """
import sys, fedfa
import torch
class Halve(fedfa.Component):
    def loss(self, ctx, batch, loss):
        return loss / 2
try:
    fedfa.load(sys.argv[1])
except fedfa.FedfaError as error:
    print("unknown method 'halve'" in str(error) and "algorithm=" in str(error))
later = fedfa.load(sys.argv[1], algorithm=Halve())
print([record.accuracy for record in later.rounds(1)])
"""


@pytest.mark.system
def test_an_experiment_with_an_own_component_is_loaded_in_another_process(tmp_path: Path) -> None:
    data = fedfa.data.load("digits").split("shards:2", clients=6, seed=0)
    experiment = fedfa.Experiment(Halve(), data=data, model="mlp", cohort=2)
    list(experiment.rounds(1))
    experiment.save(tmp_path / "run")
    command = [sys.executable, "-c", LOAD_HALVE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", str([record.accuracy for record in experiment.rounds(1)])]


def test_a_failed_save_leaves_the_run_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = fedfa.data.load("digits").split("shards:2", clients=6, seed=0)
    experiment = fedfa.Experiment("fedavg", data=data, model="mlp", cohort=2)
    list(experiment.rounds(1))
    experiment.save(tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    list(experiment.rounds(1))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedfa.experiment.run_directory.RunDirectory.write_model", full)
        with pytest.raises(OSError, match="no space"):
            experiment.save(tmp_path / "run", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (5, "returned 5; return a dict"),
        ({"accuracy": 1.0}, "returned 'accuracy', which the record has already"),
        ({"it": object()}, "returned 'it' = <object"),
    ],
)
def test_what_a_callback_returns_is_checked(returned: object, problem: str) -> None:
    data = fedfa.data.load("digits").split("shards:2", clients=6, seed=0)

    def callback(_: object, __: object) -> Any:
        return returned

    experiment = fedfa.Experiment("fedavg", data=data, model="mlp", cohort=2, callbacks=[callback])
    with pytest.raises(fedfa.FedfaError, match=f"callback 'callback' {problem}"):
        list(experiment.rounds(1))


def test_tensors_of_a_callback_become_numbers() -> None:
    data = fedfa.data.load("digits").split("shards:2", clients=6, seed=0)
    values = {"one": torch.tensor(1.5), "two": np.int64(2)}
    experiment = fedfa.Experiment("fedavg", data=data, model="mlp", cohort=2, callbacks=[lambda *_: values])
    (record,) = experiment.rounds(1)
    assert (record.one, record.two) == (1.5, 2)


def test_a_final_pass_follows_a_training_that_a_callback_ended() -> None:
    data = fedfa.data.load("digits").split("shards:2", clients=6, seed=0)
    experiment = fedfa.Experiment(
        "fedfa@plus", data=data, model="mlp", cohort=2, callbacks=[lambda experiment, _: experiment.stop()]
    )
    assert [record.final_pass for record in experiment.rounds(5)] == [False, True]
