"""The final pass after the last round: its clients, its record, and runs that are killed or extended."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ClientError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import load_tensors
from fedfa.experiment.run import run
from fedfa.learning.tensors import Tensors
from tests.experiment.run_toys import STATEFUL, assert_same_run, client_states, equal_tensors, small, timeless

CENSUS = '''"""Counts samples and clients after the last round, and shifts the classifier by the result."""

import torch

from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits

FAIL_AT = None
BREAK_STEP = False


class Census(Component):
    traits = Traits(final_pass=True)

    def contribute(self, ctx):
        if ctx.client == FAIL_AT:
            raise KeyboardInterrupt
        ctx.client_state.setdefault(self.name, {})["visited"] = torch.tensor(1.0)  # not a round: must not be stored
        noise = torch.from_numpy(ctx.rng.standard_normal(ctx.num_classes))
        answers = {
            "counts": ctx.label_counts.double(),
            "clients": torch.nn.functional.one_hot(torch.tensor(ctx.client), 10).double(),
            "weights": ctx.model.head.weight.detach().double().sum().reshape(1),
            "noise": noise,
        }
        return {"answers": WeightedSum(answers, torch.tensor(1.0))}

    def step(self, server):
        if BREAK_STEP:
            raise ZeroDivisionError("nobody there")
        answers = server.aggregate["census/answers"].tensors
        server.state[self.name] = {name: value.clone() for name, value in answers.items()}
        draw = torch.from_numpy(server.rng.standard_normal(4))
        server.update["head.bias"] = 0.01 * (answers["counts"] / 60 + answers["noise"] + draw)
'''


@pytest.fixture
def census(tmp_path: Path) -> str:
    path = tmp_path / "census.py"
    path.write_text(CENSUS)
    return str(path)


def answers(directory: Path) -> Tensors:
    """What the census counted."""
    server = load_tensors(directory / "server.safetensors")
    return {name.removeprefix("census/"): value for name, value in server.items() if name.startswith("census/")}


def stopping_at(round: int, final_pass: bool = False) -> Any:
    def watch(record: Mapping[str, Any]) -> None:
        if record["round"] == round and record.get("final_pass", False) == final_pass:
            raise KeyboardInterrupt

    return watch


# -- the clients -----------------------------------------------------------------------------------------------------
def test_every_client_with_data_takes_part_once(tmp_path: Path, blobs: DataSet, census: str) -> None:
    result = run(small(census, rounds=1, cohort={"clients": 2}), tmp_path / "run", data=blobs)
    assert len(result.metrics[0]["cohort"]) == 2
    assert result.metrics[1]["cohort"] == list(range(6))
    counted = answers(tmp_path / "run")
    assert counted["clients"].tolist() == [1.0] * 6 + [0.0] * 4
    assert counted["counts"].tolist() == [60.0] * 4


def test_clients_without_data_take_no_part(tmp_path: Path, blobs: DataSet, census: str) -> None:
    config = small(
        census, rounds=1, data={"clients": 10, "partition": {"kind": "dirichlet", "alpha": 0.02, "min_size": 0}},
        cohort={"clients": 1},
    )  # fmt: skip
    sizes = Experiment.from_config(config, data=blobs).federation.partition.sizes
    assert (sizes == 0).any(), "else the test shows nothing"
    result = run(config, tmp_path / "run", data=blobs)
    assert result.metrics[-1]["cohort"] == np.flatnonzero(sizes).tolist()
    assert answers(tmp_path / "run")["clients"].tolist() == (sizes > 0).astype(float).tolist()


def test_where_data_are_pooled_the_single_site_takes_part(tmp_path: Path, blobs: DataSet, census: str) -> None:
    result = run(small(f"centralised+{census}", rounds=1), tmp_path / "run", data=blobs)
    assert result.metrics[-1]["cohort"] == [0]
    counted = answers(tmp_path / "run")
    assert counted["clients"].tolist() == [1.0] + [0.0] * 9
    assert counted["counts"].tolist() == [60.0] * 4


def test_clients_see_the_final_model_and_nothing_is_trained_or_stored(tmp_path: Path, blobs: DataSet) -> None:
    """With a method that has client state: its files are those of the run without a final pass."""
    (tmp_path / "census.py").write_text(CENSUS)
    both = f"{STATEFUL}+{tmp_path / 'census.py'}"
    with_pass = run(small(both), tmp_path / "with", data=blobs)
    without = run(small(STATEFUL), tmp_path / "without", data=blobs)
    counted = answers(tmp_path / "with")
    expected = 6 * without.model["head.weight"].double().sum()
    torch.testing.assert_close(counted["weights"], expected.reshape(1), rtol=1e-6, atol=1e-6)
    states = [client_states(tmp_path / name) for name in ("with", "without")]
    assert states[0].keys() == states[1].keys()
    assert all(equal_tensors(tensors, states[1][name]) for name, tensors in states[0].items())
    changed = {name for name, value in without.model.items() if not torch.equal(value, with_pass.model[name])}
    assert changed == {"head.bias"}


def test_an_algorithm_without_a_final_pass_has_none(tmp_path: Path, blobs: DataSet) -> None:
    result = run(small("fedavg"), tmp_path / "run", data=blobs)
    assert len(result.metrics) == 4
    assert "final_pass" not in result.metrics[-1]
    assert "accuracy_before_final_pass" not in result.summary


# -- the record -------------------------------------------------------------------------------------------------------
def test_the_record_of_a_final_pass(tmp_path: Path, blobs: DataSet, census: str) -> None:
    seen: list[Mapping[str, Any]] = []
    config = small(census, rounds=3, evaluation={"every": 2}, local={"lr_decay": 0.5})
    result = run(config, tmp_path / "run", data=blobs, watch=seen.append)
    *rounds, final_pass = result.metrics
    assert [record["round"] for record in result.metrics] == [1, 2, 3, 4]
    assert seen == result.metrics
    assert all("final_pass" not in record for record in rounds)
    assert final_pass["final_pass"] is True
    assert final_pass.keys() - {"final_pass"} == rounds[-1].keys()
    assert final_pass["train_loss"] is None
    assert final_pass["samples_per_second"] == 0
    assert final_pass["accuracy"] is not None, "always evaluated"
    assert final_pass["loss"] != rounds[-1]["loss"]
    weights = 6 * 8 + 8 + 8 * 4 + 4
    assert final_pass["bytes_down"] == 6 * 4 * weights
    assert final_pass["bytes_up"] == 6 * (8 * (4 + 10 + 1 + 4) + 4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_accuracy"] == final_pass["accuracy"] == result.final_accuracy
    assert summary["accuracy_before_final_pass"] == rounds[-1]["accuracy"]
    evaluated = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    assert len(evaluated) == 2
    assert summary["best_accuracy"] == max(*evaluated, final_pass["accuracy"]), "never below the final one"
    assert summary["last10_accuracy"] == pytest.approx(sum(evaluated) / 2)
    assert summary["rounds"] == 3
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in result.metrics)


def test_the_final_model_is_the_one_after_the_final_pass_and_the_checkpoint_the_one_before(
    tmp_path: Path, blobs: DataSet, census: str
) -> None:
    result = run(small(census), tmp_path / "run", data=blobs)
    plain = run(small("fedavg"), tmp_path / "plain", data=blobs)
    checkpoint = load_tensors(tmp_path / "run" / "checkpoint.safetensors")
    assert checkpoint["round"].item() == 4
    for name, value in plain.model.items():
        assert torch.equal(checkpoint[f"model/{name}"], value)
    engine = Experiment.from_config(small("fedavg"), data=blobs).engine()
    assert engine.evaluate(result.model, {}).accuracy == result.final_accuracy
    assert not torch.equal(result.model["head.bias"], plain.model["head.bias"])


# -- killed, extended -------------------------------------------------------------------------------------------------
def finish_after_kills(config: Config, directory: Path, blobs: DataSet) -> None:
    """Stopped in every round, in the middle of the final pass, and after it but before the result is written."""
    for round in range(1, config.rounds + 1):
        with pytest.raises(KeyboardInterrupt):
            run(config, directory, data=blobs, resume=True, watch=stopping_at(round))
    for client in (0, 3):
        with pytest.raises(KeyboardInterrupt):
            run_with("FAIL_AT", client, config, directory, blobs)
        assert all("final_pass" not in record for record in timeless(directory))
    with pytest.raises(KeyboardInterrupt):
        run(config, directory, data=blobs, resume=True, watch=stopping_at(config.rounds + 1, final_pass=True))
    assert timeless(directory)[-1]["final_pass"], "its record is there, its result is not"
    assert not (directory / "summary.json").exists()
    run(config, directory, data=blobs, resume=True)


def run_with(switch: str, value: object, config: Config, directory: Path, blobs: DataSet) -> None:
    """A run with one of the method's switches set; the file itself stays as it is."""
    (component,) = (component for component in config.build_algorithm().components if component.name == "census")
    module = sys.modules[type(component).__module__]
    before = getattr(module, switch)
    setattr(module, switch, value)
    try:
        run(config, directory, data=blobs, resume=True)
    finally:
        setattr(module, switch, before)


@pytest.mark.parametrize("beside", ["fedfa", STATEFUL], ids=["fedfa", "stateful"])
@pytest.mark.parametrize("every", [1, 2])
def test_killed_at_any_moment_it_ends_the_same(
    tmp_path: Path, blobs: DataSet, census: str, beside: str, every: int
) -> None:
    config = small(f"{beside}+{census}", rounds=3, checkpoint={"every": every})
    run(config, tmp_path / "whole", data=blobs)
    finish_after_kills(config, tmp_path / "killed", blobs)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_resuming_a_finished_run_repeats_nothing(tmp_path: Path, blobs: DataSet, census: str) -> None:
    run(small(census), tmp_path / "run", data=blobs)
    before = timeless(tmp_path / "run")
    run(small(census), tmp_path / "run", data=blobs, resume=True, watch=stopping_at(5, final_pass=True))
    assert timeless(tmp_path / "run") == before


@pytest.mark.parametrize("beside", ["fedfa", STATEFUL], ids=["fedfa", "stateful"])
def test_a_longer_run_continues_from_the_model_before_the_final_pass(
    tmp_path: Path, blobs: DataSet, census: str, beside: str
) -> None:
    algorithm = f"{beside}+{census}"
    run(small(algorithm, rounds=2), tmp_path / "longer", data=blobs)
    run(small(algorithm, rounds=4), tmp_path / "longer", data=blobs, resume=True)
    run(small(algorithm, rounds=4), tmp_path / "whole", data=blobs)
    assert_same_run(tmp_path / "longer", tmp_path / "whole")
    assert [record.get("final_pass", False) for record in timeless(tmp_path / "longer")] == [False] * 4 + [True]


def test_a_longer_run_that_is_killed_in_its_first_new_round(tmp_path: Path, blobs: DataSet, census: str) -> None:
    run(small(census, rounds=2), tmp_path / "longer", data=blobs)
    with pytest.raises(KeyboardInterrupt):
        run(small(census, rounds=4), tmp_path / "longer", data=blobs, resume=True, watch=stopping_at(3))
    run(small(census, rounds=4), tmp_path / "longer", data=blobs, resume=True)
    run(small(census, rounds=4), tmp_path / "whole", data=blobs)
    assert_same_run(tmp_path / "longer", tmp_path / "whole")


# -- errors -----------------------------------------------------------------------------------------------------------
def test_an_error_on_the_server_names_component_and_stage(tmp_path: Path, blobs: DataSet, census: str) -> None:
    config = small(census, rounds=1)
    with pytest.raises(AlgorithmError, match=r"component 'census', final pass: ZeroDivisionError: nobody there"):
        run_with("BREAK_STEP", True, config, tmp_path / "run", blobs)
    run(config, tmp_path / "run", data=blobs, resume=True)  # the training is not lost
    assert (tmp_path / "run" / "summary.json").exists()


def test_values_that_are_not_finite_name_the_client(tmp_path: Path, blobs: DataSet) -> None:
    path = tmp_path / "bad.py"
    path.write_text(CENSUS.replace("ctx.label_counts.double()", "ctx.label_counts.double() / 0"))
    with pytest.raises(ClientError, match=r"client 0, round 2.*not finite \(in census/answers, counts\)"):
        run(small(str(path), rounds=1), tmp_path / "run", data=blobs)
