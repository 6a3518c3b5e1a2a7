from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfa.data import DataSet
from fedfa.errors import ClientError, RunError
from fedfa.experiment.build import with_own
from fedfa.experiment.config import Config
from fedfa.experiment.run import run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.learning.round import ServerState
from tests.experiment.run_toys import STATEFUL, assert_same_run, client_states, small, timeless


class PlugPulledError(Exception):
    """The moment at which a test pulls the plug: a round is recorded but not yet saved."""


def stop_after(rounds: int) -> Callable[[dict[str, Any]], None]:
    def watch(record: dict[str, Any]) -> None:
        if record["round"] == rounds:
            raise PlugPulledError

    return watch


def interrupted(config: Config, out: Path, after: int, data: DataSet) -> None:
    with pytest.raises(PlugPulledError):
        run(config, out, data=data, resume=True, watch=stop_after(after))


# -- beginning --------------------------------------------------------------------------------------------------------
def test_a_directory_holds_one_run(tmp_path: Path, blobs: DataSet) -> None:
    run(small(rounds=1), tmp_path / "run", data=blobs)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"run holds a run already; .*--resume.*overwrite=True"):
        run(small(rounds=1), tmp_path / "run", data=blobs)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, blobs: DataSet) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write to"):
        run(small(rounds=1), tmp_path / "file" / "run", data=blobs)


def test_resume_begins_where_nothing_was_begun(tmp_path: Path, blobs: DataSet) -> None:
    run(small(rounds=2), tmp_path / "a", data=blobs)
    run(small(rounds=2), tmp_path / "b", data=blobs, resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


# -- going on ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("algorithm", "every"),
    [("fedavg", 3), ("fedfa", 1), ("fedfa", 2), (STATEFUL, 1), (STATEFUL, 2)],
    ids=["fedavg 3", "fedfa 1", "fedfa 2", "stateful 1", "stateful 2"],
)
def test_stopped_after_every_round_equals_never_stopped(
    tmp_path: Path, blobs: DataSet, algorithm: str, every: int
) -> None:
    config = small(algorithm, rounds=5, checkpoint={"every": every})
    run(config, tmp_path / "whole", data=blobs)
    for after in (1, 2, 4, 5):
        interrupted(config, tmp_path / "stopped", after, blobs)
    run(config, tmp_path / "stopped", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_one_file_per_client_is_left(tmp_path: Path, blobs: DataSet) -> None:
    run(small(STATEFUL, cohort={"clients": 6}, checkpoint={"every": 2}), tmp_path / "run", data=blobs)
    assert len(client_states(tmp_path / "run")) == 6


def test_stateful_clients_keep_one_file_each_and_count_their_rounds(tmp_path: Path, blobs: DataSet) -> None:
    result = run(small(STATEFUL, rounds=5), tmp_path / "run", data=blobs)
    taken_part = [client for record in result.metrics for client in record["cohort"]]
    states = client_states(tmp_path / "run")
    assert {int(name.partition(".")[0]) for name in states} == set(taken_part)
    assert len(states) == len(set(taken_part))
    for name, tensors in states.items():
        assert tensors["habit/rounds"].item() == taken_part.count(int(name.partition(".")[0]))


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "stopped"])
def test_more_rounds_equal_that_many_from_the_start(tmp_path: Path, blobs: DataSet, stopped: bool) -> None:
    run(small(STATEFUL, rounds=5), tmp_path / "long", data=blobs)
    if stopped:
        interrupted(small(STATEFUL, rounds=3), tmp_path / "short", 2, blobs)
    else:
        assert run(small(STATEFUL, rounds=3), tmp_path / "short", data=blobs).summary["rounds"] == 3
    assert run(small(STATEFUL, rounds=5), tmp_path / "short", data=blobs, resume=True).summary["rounds"] == 5
    assert_same_run(tmp_path / "long", tmp_path / "short")


def test_more_rounds_first_take_the_old_result_away(tmp_path: Path) -> None:
    """Were the settings written first, a kill between the two would make the short run pass for the long one."""
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "config.toml").mkdir()  # so that writing the settings fails
    with pytest.raises(OSError, match=r"config\.toml"):
        RunDirectory(tmp_path).extend(small(), 0)
    assert not (tmp_path / "summary.json").exists()


def test_killed_while_more_rounds_were_being_noted(tmp_path: Path, blobs: DataSet) -> None:
    run(small(rounds=4), tmp_path / "long", data=blobs)
    run(small(rounds=2), tmp_path / "run", data=blobs)
    (tmp_path / "run" / "summary.json").unlink()  # … and here the process was killed
    run(small(rounds=4), tmp_path / "run", data=blobs, resume=True)
    assert_same_run(tmp_path / "long", tmp_path / "run")


def test_resuming_a_finished_run_reads_its_record(tmp_path: Path, blobs: DataSet) -> None:
    first = run(small(), tmp_path / "run", data=blobs)
    calls: list[dict[str, Any]] = []
    again = run(small(), tmp_path / "run", data=blobs, resume=True, watch=calls.append)
    assert again.summary == first.summary
    assert again.metrics == first.metrics
    assert calls == []


def test_other_settings_are_refused_and_named(tmp_path: Path, blobs: DataSet) -> None:
    interrupted(small(), tmp_path / "run", 2, blobs)
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    other = small(seed=2, local={"lr": 0.2}, algorithm={"anchors": {"mu": 0.3}}, data={"partition": "iid"})
    with pytest.raises(RunError) as caught:
        run(other, tmp_path / "run", data=blobs, resume=True)
    for words in (
        "seed was 1, now 2", "local.lr was 0.1, now 0.2", "algorithm.anchors.mu was 0.1, now 0.3",
        "data.partition.kind was 'shards', now 'iid'", "data.partition.classes_per_client was 2, now None",
    ):  # fmt: skip
        assert words in str(caught.value)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()} == before


def test_fewer_rounds_are_refused(tmp_path: Path, blobs: DataSet) -> None:
    run(small(rounds=3), tmp_path / "run", data=blobs)
    with pytest.raises(RunError, match="rounds was 3, now 2"):
        run(small(rounds=2), tmp_path / "run", data=blobs, resume=True)


def test_settings_of_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no config\.toml"):
        RunDirectory(tmp_path).config()


# -- damage -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tail", ['{"round": 3, "accur', '{"round": 3, "accuracy": 0.5}', "{", "\x00\x00"])
def test_an_unfinished_last_line_of_the_metrics_is_passed_over(tmp_path: Path, blobs: DataSet, tail: str) -> None:
    run(small(), tmp_path / "whole", data=blobs)
    interrupted(small(), tmp_path / "cut", 3, blobs)
    file = tmp_path / "cut" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:2]) + "\n" + tail)
    assert [record["round"] for record in RunDirectory(tmp_path / "cut").metrics()] == [1, 2]
    run(small(), tmp_path / "cut", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_damaged_checkpoint_is_an_error_and_not_a_wrong_result(tmp_path: Path, blobs: DataSet) -> None:
    interrupted(small(), tmp_path / "run", 3, blobs)
    file = tmp_path / "run" / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"checkpoint\.safetensors is damaged"):
        run(small(), tmp_path / "run", data=blobs, resume=True)


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path, blobs: DataSet) -> None:
    run(small(STATEFUL), tmp_path / "whole", data=blobs)
    interrupted(small(STATEFUL), tmp_path / "run", 2, blobs)
    (tmp_path / "run" / ".checkpoint.safetensors.4711.tmp").write_bytes(b"half")
    (tmp_path / "run" / "clients" / ".3.round2.safetensors.4711.tmp").write_bytes(b"half")
    (tmp_path / "run" / "clients" / "3.round99.safetensors").write_bytes(b"of a round that was never saved")
    run(small(STATEFUL), tmp_path / "run", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_kept_file_that_is_missing_is_an_error(tmp_path: Path, blobs: DataSet) -> None:
    config = small(STATEFUL, cohort={"clients": 6})
    interrupted(config, tmp_path / "run", 3, blobs)
    for file in (tmp_path / "run" / "clients").glob("2.round2.*"):
        file.unlink()
    with pytest.raises(RunError, match=r"2\.round2\.safetensors is missing"):
        run(config, tmp_path / "run", data=blobs, resume=True)


# -- what clients keep, in detail -------------------------------------------------------------------------------------
def state(round: int) -> ServerState:
    return ServerState(round, {"w": torch.full((2,), float(round))}, {})


def test_kept_tensors_count_from_the_next_checkpoint_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.create(small())
    directory.save_client_state(7, 1, {"component": {"x": torch.tensor([1.0])}})
    directory.checkpoint(state(1))
    directory.save_client_state(7, 2, {"component": {"x": torch.tensor([2.0])}})
    assert directory.load_client_state(7)["component"]["x"].item() == 2.0
    assert directory.load_client_state(8) == {}
    directory.close()  # killed before the second checkpoint

    again = RunDirectory(tmp_path)
    resumed = again.reopen()
    assert resumed is not None
    assert resumed.round == 1
    assert again.load_client_state(7)["component"]["x"].item() == 1.0
    assert [file.name for file in (tmp_path / "clients").iterdir()] == ["7.round1.safetensors"]
    again.save_client_state(7, 2, {"component": {"x": torch.tensor([3.0])}})
    again.checkpoint(state(2))
    assert [file.name for file in (tmp_path / "clients").iterdir()] == ["7.round2.safetensors"]
    again.close()


def test_a_client_may_stop_keeping_something(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.create(small())
    directory.save_client_state(7, 1, {"component": {"x": torch.tensor([1.0])}})
    directory.checkpoint(state(1))
    directory.save_client_state(7, 2, {})
    directory.checkpoint(state(2))
    directory.close()
    assert directory.load_client_state(7) == {}


# -- what a run began with --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("execution", ["each", "stacked"])
def test_a_run_goes_on_without_the_anchors_it_began_with(tmp_path: Path, blobs: DataSet, execution: str) -> None:
    """They are in the checkpoint, however they have moved since."""
    run(small("fedfa"), tmp_path / "first", data=blobs)
    file = tmp_path / "server.safetensors"
    shutil.copy(tmp_path / "first" / "server.safetensors", file)
    config = small(algorithm={"anchors": {"init": str(file)}}, engine={"execution": execution})
    whole = run(config, tmp_path / "whole", data=blobs)
    interrupted(config, tmp_path / "run", 2, blobs)
    file.unlink()
    assert_same_run(run(config, tmp_path / "run", data=blobs, resume=True).directory, whole.directory)


# -- the lock ---------------------------------------------------------------------------------------------------------
def _in_another_process(path: Path) -> None:
    directory = RunDirectory(path)
    try:
        directory.reopen()
    except RunError as error:
        sys.exit(77 if "being written by another process" in str(error) else 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork and advisory locks")
def test_a_second_writer_is_refused(tmp_path: Path, blobs: DataSet) -> None:
    interrupted(small(), tmp_path / "run", 2, blobs)
    holder = RunDirectory(tmp_path / "run")
    holder.reopen()
    before = timeless(tmp_path / "run")
    with pytest.raises(RunError, match="being written by another process"):
        run(small(), tmp_path / "run", data=blobs, resume=True)
    process = multiprocessing.get_context("fork").Process(target=_in_another_process, args=(tmp_path / "run",))
    process.start()
    process.join(120)
    assert process.exitcode == 77
    assert timeless(tmp_path / "run") == before
    holder.close()
    run(small(), tmp_path / "run", data=blobs, resume=True)


def test_a_folder_in_which_nothing_can_be_written_is_named(tmp_path: Path, blobs: DataSet) -> None:
    interrupted(small(), tmp_path / "run", 1, blobs)
    (tmp_path / "run" / ".lock").unlink(missing_ok=True)
    (tmp_path / "run" / ".lock").mkdir()  # so that it cannot be opened, not even by one who may do all
    with pytest.raises(RunError, match=r"cannot write to .*run: .*choose another --out"):
        run(small(), tmp_path / "run", data=blobs, resume=True)


def test_the_lock_is_let_go_after_an_error(tmp_path: Path, blobs: DataSet) -> None:
    interrupted(small(), tmp_path / "run", 1, blobs)
    interrupted(small(), tmp_path / "run", 2, blobs)


def test_the_summary_is_written_last(tmp_path: Path, blobs: DataSet) -> None:
    run(small(), tmp_path / "run", data=blobs)
    times = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()}
    assert max(times, key=lambda name: times[name]) == "summary.json"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 4


def test_a_run_that_failed_before_its_first_round_was_saved_can_be_replaced(tmp_path: Path, blobs: DataSet) -> None:
    with pytest.raises(ClientError, match="lower local"):
        run(small(rounds=1, local={"lr": 1e30}), tmp_path / "run", data=blobs)
    again = run(small(rounds=1), tmp_path / "run", data=blobs)
    assert len(again.metrics) == 1
    assert RunDirectory(tmp_path / "run").config() == with_own(small(rounds=1), None, blobs)
