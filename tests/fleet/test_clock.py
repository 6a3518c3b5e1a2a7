"""Trainings on a clock: the same bits where they must be, kept accounts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ConfigError, RunError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.record import RoundRecord
from fedfa.experiment.run import run
from fedfa.fleet.config import FleetConfig
from fedfa.fleet.memory import ClockMemory
from fedfa.fleet.staleness import as_model, as_update, scale
from fedfa.learning.aggregate import Aggregate, WeightedSum
from fedfa.learning.client import ClientResult
from tests.experiment.run_toys import STATEFUL, assert_same_run, equal_tensors, small

EQUAL = {"devices": "equal"}
DRAWN = {"devices": "lognormal", "spread": 1.5}
POLICIES: dict[str, dict[str, Any]] = {
    "wait": {},
    "over-selection": {"over_selection": 1.3},
    "drop": {"policy": "deadline", "deadline": 0.8},
    "next": {"policy": "deadline", "deadline": 0.8, "late": "next"},
    "partial": {"policy": "deadline", "deadline": 0.8, "late": "partial"},
    "fedbuff": {"policy": "fedbuff", "buffer": 2, "concurrency": 4},
    "fedasync": {"policy": "fedasync", "concurrency": 3},
}


def config(algorithm: str = "fedavg", fleet: dict[str, Any] | None = None, **more: Any) -> Config:
    fleet = {} if fleet is None else {"fleet": fleet}
    return small(algorithm, **fleet, **{"engine": {"workers": 1, "execution": "each"}, **more})


def trained(data: DataSet, algorithm: str = "fedavg", fleet: dict[str, Any] | None = None, **more: Any) -> Experiment:
    experiment = Experiment.from_config(config(algorithm, fleet, **more), data=data)
    for _ in experiment.rounds(progress=False):
        pass
    return experiment


# -- equality ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fedfa", "scaffold"])
def test_equal_devices_change_nothing_but_add_times(blobs: DataSet, algorithm: str) -> None:
    """40 samples, 2 epochs at 100 samples a second, and the transfers of the record's own bytes: 4 of 4 alike."""
    without, on = trained(blobs, algorithm), trained(blobs, algorithm, EQUAL)
    assert equal_tensors(without.state.model, on.state.model)
    clock = 0.0
    for before, after in zip(without.records, on.records, strict=True):
        shared = {key for key in before if "seconds" not in key and key != "samples_per_second"}
        assert {key: before[key] for key in shared} == {key: after[key] for key in shared}
        clock += before["bytes_down"] / 4 / 4_318_000 + 80 / 100 + before["bytes_up"] / 4 / 3_286_000
        assert after.time == pytest.approx(clock, rel=1e-12)
        assert after.utilisation == 1
    assert "time" not in without.records[0]


def test_fedbuff_with_equal_devices_and_a_full_buffer_is_fedavg(blobs: DataSet) -> None:
    fleet = {**EQUAL, "policy": "fedbuff", "staleness": "none"}
    assert equal_tensors(trained(blobs).state.model, trained(blobs, fleet=fleet).state.model)


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_and_stacking_change_no_bit(blobs: DataSet, policy: str) -> None:
    """The contribution of the policy is visible, so that the equality says something."""
    fleet = {**DRAWN, **POLICIES[policy]}
    one = trained(blobs, "fedfa", fleet)
    two = trained(blobs, "fedfa", fleet, engine={"workers": 2, "execution": "each"})
    stacked = trained(blobs, "fedfa", fleet, engine={"execution": "stacked"})
    for other in (two, stacked):
        assert [record.time for record in other.records] == [record.time for record in one.records]
        assert [record.cohort for record in other.records] == [record.cohort for record in one.records]
    assert equal_tensors(one.state.to_tensors(), two.state.to_tensors())
    for name, tensor in one.state.model.items():
        torch.testing.assert_close(tensor, stacked.state.model[name])
    times = [record.time for record in one.records]
    assert times == sorted(times)
    if policy in ("over-selection", "drop", "partial"):
        assert any(record.late for record in one.records) or policy == "partial"
    if policy in ("next", "fedbuff", "fedasync"):
        assert max(age for record in one.records for age in record.staleness) > 0


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("policy", ["partial", "next", "fedbuff"])
def test_a_run_that_was_killed_continues_with_the_same_bits(blobs: DataSet, policy: str, tmp_path: Path) -> None:
    """Stopped in rounds 2, 3 and 5 of six, between the record and the checkpoint; every second round has one."""
    planned = config(STATEFUL, {**DRAWN, **POLICIES[policy]}, rounds=6, checkpoint={"every": 2})
    run(planned, tmp_path / "whole", data=blobs)
    for at in (2, 3, 5):

        def kill(record: dict[str, Any], at: int = at) -> None:
            if record["round"] == at:
                raise _KilledError

        with pytest.raises(_KilledError):
            run(planned, tmp_path / "killed", data=blobs, resume=True, watch=kill)
    run(planned, tmp_path / "killed", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_another_fleet_does_not_continue_a_run(blobs: DataSet, tmp_path: Path) -> None:
    devices = tmp_path / "devices.csv"
    devices.write_text("speed,down,up\n" + "50,1000,1000\n" * 6)
    planned = config(fleet={"devices": str(devices)}, rounds=2)

    def kill(record: dict[str, Any]) -> None:
        raise _KilledError

    with pytest.raises(_KilledError):
        run(planned, tmp_path / "run", data=blobs, watch=kill)
    devices.write_text("speed,down,up\n" + "51,1000,1000\n" * 6)
    with pytest.raises(RunError, match="fleet changed"):
        run(planned, tmp_path / "run", data=blobs, resume=True)


# -- accounts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["drop", "next", "fedbuff"])
def test_the_control_variate_of_the_server_stays_the_mean_of_the_clients(blobs: DataSet, policy: str) -> None:
    """SCAFFOLD's c is the mean of all c_i, whoever was cut off, late or under way."""
    experiment = trained(blobs, "scaffold", {**DRAWN, **POLICIES[policy]}, rounds=8, local={"lr": 0.02})
    server = experiment.state.components["scaffold"]
    states = [experiment.client_states.load(client).get("scaffold", {}) for client in range(6)]
    names = [name for name in server if name in experiment.state.model]
    assert names
    for name in names:
        own = sum((state[name].double() for state in states if name in state), torch.zeros(()).double())
        torch.testing.assert_close(server[name].double(), own / 6, rtol=1e-4, atol=1e-6)


def test_a_round_in_which_nobody_arrives_changes_nothing_but_the_time(blobs: DataSet) -> None:
    experiment = trained(blobs, "fedfa", {**EQUAL, "policy": "deadline", "deadline": 0.1}, rounds=2)
    assert equal_tensors(experiment.state.model, experiment.training.init().model)
    assert [(record.cohort, record.time, record.late) for record in experiment.records] == [([], 0.1, 4), ([], 0.2, 4)]


def test_partial_work_is_what_the_deadline_allows(blobs: DataSet) -> None:
    """Equal devices, 80 samples wanted at 100 a second, deadline 0.5: the transfers take some milliseconds, so 49
    samples fit: of epochs of 40 (16, 16, 8) the first whole one and no further batch of 16, 3 steps."""
    seen: list[ClientResult] = []

    class Watching(Experiment):
        def engine(self) -> Any:
            engine = super().engine()
            train = engine.train

            def watched(plan: Any, clients: Any, load: Any) -> Any:
                for result in train(plan, clients, load):
                    seen.append(result)
                    yield result

            engine.train = watched  # type: ignore[assignment, method-assign]
            return engine

    fleet = {**EQUAL, "policy": "deadline", "deadline": 0.5, "late": "partial"}
    experiment = Watching.from_config(config("fednova", fleet, rounds=1), data=blobs)
    (record,) = experiment.rounds(progress=False)
    assert [result.steps for result in seen[1:]] == [3] * 4  # the first one is the trial that measures a contribution
    assert [result.sample_steps for result in seen[1:]] == [40] * 4
    assert 0.4 < record.time < 0.5


def test_what_is_under_way_is_in_the_state(blobs: DataSet) -> None:
    experiment = trained(blobs, fleet={**DRAWN, **POLICIES["fedbuff"]})
    memory = ClockMemory.of(experiment.state)
    assert len(memory.running) >= 2
    assert memory.results.keys() == {visit.client for visit in memory.running}
    assert memory.time == experiment.records[-1].time


def test_the_final_pass_takes_as_long_as_its_slowest_client(blobs: DataSet) -> None:
    experiment = trained(blobs, "fedavg+ccvr", EQUAL, rounds=1)
    before, final = experiment.records
    down, up = final["bytes_down"] / 6 / 4_318_000, final["bytes_up"] / 6 / 3_286_000
    assert final.time - before.time == pytest.approx(down + 40 / 100 + up)


def test_devices_that_come_and_go(blobs: DataSet) -> None:
    fleet = {**DRAWN, "availability": "daily", "session": 60.0, "available": 0.5, "speed": 0.5}
    records = trained(blobs, fleet=fleet, rounds=6, cohort={"clients": 2}).records
    assert any(record.offline for record in records)
    assert all(record["bytes_down"] == records[0]["bytes_down"] for record in records)
    assert all(0 <= record.utilisation <= 1 for record in records)


# -- staleness --------------------------------------------------------------------------------------------------------
def result_of(**groups: WeightedSum) -> ClientResult:
    return ClientResult(0, {name.replace("_", "/"): entry for name, entry in groups.items()}, {}, 1, 1, None)


def test_updates_are_damped_values_are_weighed_accounts_are_kept() -> None:
    """Two contributions of weight 2, one of them three versions old: s = (1 + 3)^−½ = ½.

    FedBuff's update is (2 · 1 + ½ · 2 · 1) / (2 + 2) = ¾ where both updates are 1; the mean of the values 1 (fresh) and
    4 (old) is (2 · 1 + ½ · 2 · 4) / (2 + ½ · 2) = 2; the control variate's changes stay as they are.
    """
    algorithm = config("scaffold+fedproto").build_algorithm()
    aggregate = Aggregate()
    for value, factor in ((1.0, 1.0), (4.0, 0.5)):
        result = result_of(
            scaffold_model=WeightedSum.of({"w": torch.ones(1)}, 2),
            scaffold_control=WeightedSum.of({"w": torch.ones(1)}, 2),
            fedproto_prototypes=WeightedSum.of({"p": torch.full((1, 1), value)}, torch.full((1, 1), 2.0)),
        )
        aggregate.add(scale(result, factor, algorithm).contribution)
    assert aggregate.mean("scaffold/model")["w"].tolist() == [0.75]
    assert aggregate.mean("scaffold/control")["w"].tolist() == [1.0]
    assert aggregate.mean("fedproto/prototypes")["p"].tolist() == [[2.0]]


def test_fedasync_mixes_the_clients_model_into_the_current_one() -> None:
    """Received 5, trained to 7; meanwhile the model is 8, two versions later: α s(2) = 0.6/√3.

    The new model is (1 − α s) 8 + α s · 7 = 8 − 0.6/√3.
    """
    sent = result_of(fedavg_model=WeightedSum.of({"w": torch.tensor([2.0])}, 10))
    arrived = as_update(as_model(sent, {"w": torch.tensor([5.0])}), {"w": torch.tensor([8.0])})
    aggregate = Aggregate()
    aggregate.add(scale(arrived, 0.6 * 3**-0.5, config().build_algorithm()).contribution)
    assert 8 + float(aggregate.mean("fedavg/model")["w"]) == pytest.approx(8 - 0.6 / 3**0.5, rel=1e-6)
    assert arrived.contribution["fedavg/model"].tensors["w"].dtype == torch.float32  # what it was on the wire


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("algorithm", "policy", "message"),
    [
        ("feddyn", "fedbuff", "'feddyn' cannot be combined with fleet.policy = \"fedbuff\": the server's h"),
        ("feddyn", "next", 'fleet.policy = "deadline" with fleet.late = "next"'),
        ("fedacg", "fedbuff", "look-ahead"),
        ("fedexp", "fedbuff", "one model"),
        ("scaffold", "fedasync", "FedAsync mixes the models"),
    ],
)
def test_combinations_without_a_meaning_are_refused(blobs: DataSet, algorithm: str, policy: str, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message):
        Experiment.from_config(config(algorithm, {**DRAWN, **POLICIES[policy]}), data=blobs)
    Experiment.from_config(config(algorithm, {**DRAWN, **POLICIES["drop"]}), data=blobs)


def test_what_has_no_clients_or_asks_for_too_many_is_refused(blobs: DataSet) -> None:
    with pytest.raises(ConfigError, match="no clients whose devices could be timed"):
        Experiment.from_config(config("centralised", EQUAL), data=blobs)
    with pytest.raises(ConfigError, match=r"fleet\.buffer = 7, but only 6 clients"):
        Experiment.from_config(config(fleet={**EQUAL, "policy": "fedbuff", "buffer": 7}), data=blobs)
    with pytest.raises(ConfigError, match="diagnostics compare clients of one round"):
        Experiment.from_config(config(fleet={**EQUAL, "policy": "fedbuff"}, diagnostics={"every": 1}), data=blobs)


def test_a_record_of_a_clock_has_plain_values(blobs: DataSet) -> None:
    record = trained(blobs, fleet={**DRAWN, **POLICIES["fedbuff"]}, rounds=1).records[0]
    assert isinstance(record, RoundRecord)
    client, version, start, downloaded, done, end, outcome = record.timeline[0]
    assert (version, start, outcome) == (0, 0.0, "counted")
    assert start < downloaded < done < end == pytest.approx(record.time, rel=1)
    assert client in record.cohort
    assert FleetConfig(**EQUAL).on
