"""The survey after the last round: who is asked, what is recorded, and that a run may be killed or made longer."""

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
from fedfa.errors import ClientError, RecipeError
from fedfa.learning.tensors import Tensors
from fedfa.studies.files import load_tensors
from fedfa.studies.run import run
from fedfa.studies.settings import Settings
from fedfa.studies.setup import prepare
from tests.studies.study_toys import STATEFUL, assert_same_run, equal_tensors, kept_by_clients, small, timeless

CENSUS = '''"""Counts samples and clients after the last round, and shifts the classifier by what it heard."""

import torch

from fedfa.learning.part import NoOptions, Part
from fedfa.learning.sums import WeightedSum

FAIL_AT = None
BREAK_CONCLUSION = False


class Census(Part[NoOptions]):
    name = "census"

    def survey(self, ctx):
        if ctx.client == FAIL_AT:
            raise KeyboardInterrupt
        ctx.kept.setdefault(self.name, {})["visited"] = torch.tensor(1.0)  # not a round: must not be stored
        noise = torch.from_numpy(ctx.rng.standard_normal(ctx.num_classes))
        told = {
            "counts": ctx.label_counts.double(),
            "clients": torch.nn.functional.one_hot(torch.tensor(ctx.client), 10).double(),
            "weights": ctx.model.head.weight.detach().double().sum().reshape(1),
            "noise": noise,
        }
        return {"told": WeightedSum(told, torch.tensor(1.0))}

    def conclude(self, server):
        if BREAK_CONCLUSION:
            raise ZeroDivisionError("nobody there")
        told = server.total["census/told"].tensors
        server.state[self.name] = {name: value.clone() for name, value in told.items()}
        draw = torch.from_numpy(server.rng.standard_normal(4))
        server.update["head.bias"] = 0.01 * (told["counts"] / 60 + told["noise"] + draw)
'''


@pytest.fixture
def census(tmp_path: Path) -> str:
    path = tmp_path / "census.py"
    path.write_text(CENSUS)
    return str(path)


def told(folder: Path) -> Tensors:
    """What the census heard."""
    server = load_tensors(folder / "server.safetensors")
    return {name.removeprefix("census/"): value for name, value in server.items() if name.startswith("census/")}


def stopping_at(round: int, survey: bool = False) -> Any:
    def watch(record: Mapping[str, Any]) -> None:
        if record["round"] == round and record.get("survey", False) == survey:
            raise KeyboardInterrupt

    return watch


# -- who is asked -----------------------------------------------------------------------------------------------------
def test_every_client_with_data_is_asked_once_drawn_or_not(tmp_path: Path, blobs: DataSet, census: str) -> None:
    result = run(small(census, rounds=1, cohort={"clients": 2}), tmp_path / "run", data=blobs)
    assert len(result.metrics[0]["cohort"]) == 2
    assert result.metrics[1]["cohort"] == list(range(6))
    heard = told(tmp_path / "run")
    assert heard["clients"].tolist() == [1.0] * 6 + [0.0] * 4
    assert heard["counts"].tolist() == [60.0] * 4


def test_clients_without_data_are_not_asked(tmp_path: Path, blobs: DataSet, census: str) -> None:
    settings = small(
        census, rounds=1, data={"clients": 10, "partition": {"kind": "dirichlet", "alpha": 0.02, "min_size": 0}},
        cohort={"clients": 1},
    )  # fmt: skip
    sizes = prepare(settings, data=blobs).federation.partition.sizes
    assert (sizes == 0).any(), "else the test shows nothing"
    result = run(settings, tmp_path / "run", data=blobs)
    assert result.metrics[-1]["cohort"] == np.flatnonzero(sizes).tolist()
    assert told(tmp_path / "run")["clients"].tolist() == (sizes > 0).astype(float).tolist()


def test_where_data_are_pooled_the_one_site_is_asked(tmp_path: Path, blobs: DataSet, census: str) -> None:
    result = run(small(f"centralised+{census}", rounds=1), tmp_path / "run", data=blobs)
    assert result.metrics[-1]["cohort"] == [0]
    heard = told(tmp_path / "run")
    assert heard["clients"].tolist() == [1.0] + [0.0] * 9
    assert heard["counts"].tolist() == [60.0] * 4


def test_clients_see_the_final_model_and_nothing_is_trained_or_kept(tmp_path: Path, blobs: DataSet) -> None:
    """Beside a method that keeps tensors on clients: their files are those of the run without a survey."""
    (tmp_path / "census.py").write_text(CENSUS)
    both = f"{STATEFUL}+{tmp_path / 'census.py'}"
    with_survey = run(small(both), tmp_path / "with", data=blobs)
    without = run(small(STATEFUL), tmp_path / "without", data=blobs)
    heard = told(tmp_path / "with")
    expected = 6 * without.model["head.weight"].double().sum()
    torch.testing.assert_close(heard["weights"], expected.reshape(1), rtol=1e-6, atol=1e-6)
    kept = [kept_by_clients(tmp_path / name) for name in ("with", "without")]
    assert kept[0].keys() == kept[1].keys()
    assert all(equal_tensors(tensors, kept[1][name]) for name, tensors in kept[0].items())
    changed = {name for name, value in without.model.items() if not torch.equal(value, with_survey.model[name])}
    assert changed == {"head.bias"}


def test_a_recipe_without_a_survey_has_none(tmp_path: Path, blobs: DataSet) -> None:
    result = run(small("fedavg"), tmp_path / "run", data=blobs)
    assert len(result.metrics) == 4
    assert "survey" not in result.metrics[-1]
    assert "accuracy_before_survey" not in result.summary


# -- the record -------------------------------------------------------------------------------------------------------
def test_the_record_of_a_survey(tmp_path: Path, blobs: DataSet, census: str) -> None:
    seen: list[Mapping[str, Any]] = []
    settings = small(census, rounds=3, evaluation={"every": 2}, local={"lr_decay": 0.5})
    result = run(settings, tmp_path / "run", data=blobs, watch=seen.append)
    *rounds, survey = result.metrics
    assert [record["round"] for record in result.metrics] == [1, 2, 3, 4]
    assert seen == result.metrics
    assert all("survey" not in record for record in rounds)
    assert survey["survey"] is True
    assert survey.keys() - {"survey"} == rounds[-1].keys()
    assert survey["train_loss"] is None
    assert survey["samples_per_second"] == 0
    assert survey["accuracy"] is not None, "always evaluated"
    assert survey["loss"] != rounds[-1]["loss"]
    weights = 6 * 8 + 8 + 8 * 4 + 4
    assert survey["bytes_down"] == 6 * 4 * weights
    assert survey["bytes_up"] == 6 * (8 * (4 + 10 + 1 + 4) + 4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_accuracy"] == survey["accuracy"] == result.final_accuracy
    assert summary["accuracy_before_survey"] == rounds[-1]["accuracy"]
    evaluated = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    assert len(evaluated) == 2
    assert summary["best_accuracy"] == max(evaluated)
    assert summary["last10_accuracy"] == pytest.approx(sum(evaluated) / 2)
    assert summary["rounds"] == 3
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in result.metrics)


def test_the_final_model_is_the_one_after_the_survey_and_the_checkpoint_the_one_before(
    tmp_path: Path, blobs: DataSet, census: str
) -> None:
    result = run(small(census), tmp_path / "run", data=blobs)
    plain = run(small("fedavg"), tmp_path / "plain", data=blobs)
    checkpoint = load_tensors(tmp_path / "run" / "checkpoint.safetensors")
    assert checkpoint["round"].item() == 4
    for name, value in plain.model.items():
        assert torch.equal(checkpoint[f"model/{name}"], value)
    engine = prepare(small("fedavg"), data=blobs).engine()
    assert engine.evaluate(result.model, {}).accuracy == result.final_accuracy
    assert not torch.equal(result.model["head.bias"], plain.model["head.bias"])


# -- killed, made longer ----------------------------------------------------------------------------------------------
def finish_after_kills(settings: Settings, folder: Path, blobs: DataSet) -> None:
    """Stopped in every round, in the middle of the survey, and after it but before the result is written."""
    for round in range(1, settings.rounds + 1):
        with pytest.raises(KeyboardInterrupt):
            run(settings, folder, data=blobs, resume=True, watch=stopping_at(round))
    for client in (0, 3):
        with pytest.raises(KeyboardInterrupt):
            run_with("FAIL_AT", client, settings, folder, blobs)
        assert all("survey" not in record for record in timeless(folder))
    with pytest.raises(KeyboardInterrupt):
        run(settings, folder, data=blobs, resume=True, watch=stopping_at(settings.rounds + 1, survey=True))
    assert timeless(folder)[-1]["survey"], "its record is there, its result is not"
    assert not (folder / "summary.json").exists()
    run(settings, folder, data=blobs, resume=True)


def run_with(switch: str, value: object, settings: Settings, folder: Path, blobs: DataSet) -> None:
    """A run with one of the method's switches set; the file itself stays as it is."""
    (part,) = (part for part in settings.recipe().parts if part.name == "census")
    module = sys.modules[type(part).__module__]
    before = getattr(module, switch)
    setattr(module, switch, value)
    try:
        run(settings, folder, data=blobs, resume=True)
    finally:
        setattr(module, switch, before)


@pytest.mark.parametrize("beside", ["fedfa", STATEFUL], ids=["fedfa", "stateful"])
@pytest.mark.parametrize("every", [1, 2])
def test_killed_at_any_moment_it_ends_the_same(
    tmp_path: Path, blobs: DataSet, census: str, beside: str, every: int
) -> None:
    settings = small(f"{beside}+{census}", rounds=3, checkpoint={"every": every})
    run(settings, tmp_path / "whole", data=blobs)
    finish_after_kills(settings, tmp_path / "killed", blobs)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_resuming_a_finished_run_asks_nobody_again(tmp_path: Path, blobs: DataSet, census: str) -> None:
    run(small(census), tmp_path / "run", data=blobs)
    before = timeless(tmp_path / "run")
    run(small(census), tmp_path / "run", data=blobs, resume=True, watch=stopping_at(5, survey=True))
    assert timeless(tmp_path / "run") == before


@pytest.mark.parametrize("beside", ["fedfa", STATEFUL], ids=["fedfa", "stateful"])
def test_a_longer_run_goes_on_from_the_model_before_the_survey(
    tmp_path: Path, blobs: DataSet, census: str, beside: str
) -> None:
    recipe = f"{beside}+{census}"
    run(small(recipe, rounds=2), tmp_path / "longer", data=blobs)
    run(small(recipe, rounds=4), tmp_path / "longer", data=blobs, resume=True)
    run(small(recipe, rounds=4), tmp_path / "whole", data=blobs)
    assert_same_run(tmp_path / "longer", tmp_path / "whole")
    assert [record.get("survey", False) for record in timeless(tmp_path / "longer")] == [False] * 4 + [True]


def test_a_longer_run_that_is_killed_in_its_first_new_round(tmp_path: Path, blobs: DataSet, census: str) -> None:
    run(small(census, rounds=2), tmp_path / "longer", data=blobs)
    with pytest.raises(KeyboardInterrupt):
        run(small(census, rounds=4), tmp_path / "longer", data=blobs, resume=True, watch=stopping_at(3))
    run(small(census, rounds=4), tmp_path / "longer", data=blobs, resume=True)
    run(small(census, rounds=4), tmp_path / "whole", data=blobs)
    assert_same_run(tmp_path / "longer", tmp_path / "whole")


# -- errors -----------------------------------------------------------------------------------------------------------
def test_what_goes_wrong_on_the_server_names_part_and_moment(tmp_path: Path, blobs: DataSet, census: str) -> None:
    settings = small(census, rounds=1)
    with pytest.raises(RecipeError, match=r"part 'census', conclusion: ZeroDivisionError: nobody there"):
        run_with("BREAK_CONCLUSION", True, settings, tmp_path / "run", blobs)
    run(settings, tmp_path / "run", data=blobs, resume=True)  # the training is not lost
    assert (tmp_path / "run" / "summary.json").exists()


def test_values_that_are_not_finite_name_the_client(tmp_path: Path, blobs: DataSet) -> None:
    path = tmp_path / "bad.py"
    path.write_text(CENSUS.replace("ctx.label_counts.double()", "ctx.label_counts.double() / 0"))
    with pytest.raises(ClientError, match=r"client 0, round 2.*not finite \(in census/told, counts\)"):
        run(small(str(path), rounds=1), tmp_path / "run", data=blobs)
