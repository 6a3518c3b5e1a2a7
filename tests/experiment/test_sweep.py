"""Comparisons: cells, processes, failures, going on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfa.engines.worker_count import available_cores
from fedfa.errors import ConfigError
from fedfa.experiment import sweep
from fedfa.experiment.run import run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.run_processes import RunProcess
from fedfa.experiment.sweep import Cell, Comparison, plan_cells
from fedfa.report.comparison_table import HEADER, comparison_rows
from fedfa.text_tables import markdown_table

QUICK: dict[str, Any] = {
    "rounds": 2, "device": "cpu", "data": {"name": "digits", "clients": 10}, "model": {"name": "logistic"},
    "cohort": {"clients": 2}, "local": {"epochs": 1},
}  # fmt: skip


def quiet(cell: Cell, record: dict[str, Any]) -> None:
    pass


def test_cells_are_methods_times_seeds_under_equal_settings(tmp_path: Path) -> None:
    cells = plan_cells(["fedavg", "fedfa@authors", "fedfa+fedlc"], [1, 7], [QUICK, {"rounds": 3}], tmp_path)
    assert [cell.directory.name for cell in cells] == [
        "fedavg-s1", "fedavg-s7", "fedfa-authors-s1", "fedfa-authors-s7", "fedfa-fedlc-s1", "fedfa-fedlc-s7",
    ]  # fmt: skip
    assert {cell.config.rounds for cell in cells} == {3}
    assert [cell.config.seed for cell in cells] == [1, 7] * 3
    assert cells[2].config.local.lr_decay == 0.99, "the variant's settings apply"
    assert cells[2].title == "fedfa@authors"


def test_without_a_seed_it_is_the_one_of_the_settings(tmp_path: Path) -> None:
    [cell] = plan_cells(["moon"], [], [QUICK, {"seed": 5, "algorithm": {"moon": {"mu": 2.0}}}], tmp_path)
    assert (cell.directory.name, cell.config.seed) == ("moon-s5", 5)


def test_the_same_cell_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"two runs would go to .*fedavg-s1"):
        plan_cells(["fedavg", "fedavg"], [1], [QUICK], tmp_path)


@pytest.mark.system
def test_runs_in_processes_are_those_of_this_process_and_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    """The logistic network has no normalisation layers: fedbn is refused, with its reason; the rest is there."""
    cells = plan_cells(["fedbn", "fedavg", "fedfa"], [1], [QUICK], tmp_path / "compare")
    seen: list[tuple[str, int]] = []
    counted: list[tuple[int, int]] = []
    work = Comparison(
        cells,
        2,
        lambda cell, record: seen.append((cell.title, record["round"])),
        count=lambda finished, runs: counted.append((finished, runs)),
    )
    work.run()
    assert counted == [(0, 3), (1, 3), (2, 3)]
    assert list(work.failed) == ["fedbn-s1"]
    assert "normalisation" in work.failed["fedbn-s1"]
    assert sorted(seen) == [("fedavg", 1), ("fedavg", 2), ("fedfa", 1), ("fedfa", 2)]
    here = run(cells[2].config, tmp_path / "here")
    there = json.loads((cells[2].directory / "summary.json").read_text())
    assert there["final_accuracy"] == here.final_accuracy
    assert [cell.finished() for cell in cells] == [False, True, True]

    def never(cell: Cell, record: dict[str, Any]) -> None:
        raise AssertionError("a finished cell was run again")

    Comparison(cells[1:], 2, never).run()
    rows = comparison_rows([cell.directory for cell in cells])
    assert [row[0] for row in rows] == ["fedavg", "fedfa"]
    assert len(rows[0]) == len(HEADER)
    assert markdown_table(HEADER, rows).count("\n") == 3


@pytest.mark.parametrize(
    ("methods", "jobs", "cores", "shares"),
    [
        (["fedavg"], 4, 8, [8]),  # alone: all of them, and none idle
        (["fedavg", "fedprox"], 4, 8, [4, 4]),
        (["fedavg", "fedprox"], None, 8, [4, 4]),
        (["fedavg", "fedprox"], 1, 8, [8, 8]),  # one after the other
        (["fedavg", "fedprox", "fedlc"], 4, 8, [2, 2, 2]),
        (["fedavg", "fedprox", "fedlc"], 2, 2, [1, 1]),  # the third: what the others leave, which depends on time
        (["fedavg", "fedprox"], 4, 1, [1, 1]),
    ],
)
def test_cells_share_the_cores(
    methods: list[str], jobs: int | None, cores: int, shares: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def start(self: Comparison, cell: Cell, cores: int) -> object:
        given.append(cores)
        process = RunProcess([sys.executable, "-c", "pass"])
        return sweep._Running(cell, process, tmp_path / "log", before=0)

    monkeypatch.setattr(sweep, "available_cores", lambda: cores)
    monkeypatch.setattr(Comparison, "_start", start)
    Comparison(plan_cells(methods, [1], [QUICK], tmp_path), jobs, quiet).run()
    assert given[: len(shares)] == shares
    assert len(given) == len(methods)


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no list of processes to look into here")
@pytest.mark.parametrize(("asked", "share", "workers"), [("auto", 2, 2), (1, 2, 0)])
def test_a_long_cell_takes_workers_for_its_share_or_as_many_as_its_settings_say(
    asked: str | int, share: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if share > available_cores():
        pytest.skip("this machine has one core")
    monkeypatch.setattr(sweep, "available_cores", lambda: share)
    engine = {"workers": asked, "execution": "each"}
    [cell] = plan_cells(["fedavg"], [1], [QUICK, {"rounds": 100_000, "engine": engine}], tmp_path)

    class SeenEnoughError(Exception):
        pass

    def look(cell: Cell, record: dict[str, Any]) -> None:
        [running] = work._running.values()
        pid = running.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        raise SeenEnoughError(len(children))

    work = Comparison([cell], 1, look)
    with pytest.raises(SeenEnoughError, match=f"^{workers}$"):
        work.run()


def test_a_folder_with_another_run_is_not_written_over(tmp_path: Path) -> None:
    run(plan_cells(["fedavg"], [1], [QUICK], tmp_path)[0].config, tmp_path / "fedavg-s1")
    before = (tmp_path / "fedavg-s1" / "metrics.jsonl").read_bytes()
    cells = plan_cells(["fedavg"], [1], [QUICK, {"local": {"lr": 0.5}}], tmp_path)
    assert not cells[0].finished()
    work = Comparison(cells, 1, quiet)
    work.run()
    assert "another config" in work.failed["fedavg-s1"]
    assert (tmp_path / "fedavg-s1" / "metrics.jsonl").read_bytes() == before


@pytest.mark.system
def test_a_damaged_cell_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    """A summary that is cut short, a configuration that is none: named with what to do; the rest is run."""
    cells = plan_cells(["fedavg", "fedprox", "fedfa"], [1], [QUICK], tmp_path)
    for cell, file in ((cells[0], "summary.json"), (cells[1], "config.toml")):
        cell.directory.mkdir()
        (cell.directory / "config.toml").write_text(cell.config.to_toml(), encoding="utf-8")
        summary = {"final_accuracy": 1, "best_accuracy": 1, "last10_accuracy": 1, "rounds": 2}
        (cell.directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        (cell.directory / file).write_text("{ cut", encoding="utf-8")
    begun = plan_cells(["moon"], [1], [QUICK], tmp_path)
    begun[0].directory.mkdir()
    (begun[0].directory / "config.toml").write_text("from_another_version = 1\n", encoding="utf-8")
    work = Comparison([*begun, *cells], 2, quiet)
    work.run()
    assert set(work.failed) == {"moon-s1", "fedavg-s1", "fedprox-s1"}
    assert "unknown key from_another_version" in work.failed["moon-s1"]
    assert "--out" in work.failed["moon-s1"]
    assert "summary.json" in work.failed["fedavg-s1"]
    assert "cannot be read" in work.failed["fedprox-s1"]
    assert "--out" in work.failed["fedprox-s1"]
    assert cells[2].finished()


METHOD = '''"""A method of one's own."""

from fedfa import Component


class Own(Component):
    def loss(self, ctx, batch, loss):
        return loss * 1.0
'''


def test_a_method_file_that_changed_is_noticed_in_finished_cells(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(METHOD, encoding="utf-8")
    [cell] = plan_cells([str(own)], [1], [QUICK], tmp_path / "out")
    run(cell.config, cell.directory)
    assert cell.finished()
    own.write_text(METHOD.replace("1.0", "2.0"), encoding="utf-8")
    work = Comparison([cell], 1, quiet)
    work.run()
    assert "own.py changed since" in work.failed["own-s1"]
    own.write_text(METHOD, encoding="utf-8")
    assert cell.finished(), "put back, it is the same again"


def test_a_cell_that_another_process_is_working_on_is_left_to_it(tmp_path: Path) -> None:
    [cell] = plan_cells(["fedavg"], [1], [QUICK], tmp_path)
    other = RunDirectory(cell.directory)
    other.create(cell.config)
    log = tmp_path / "fedavg-s1.log"
    log.write_text("what the other one said", encoding="utf-8")
    try:
        work = Comparison([cell], 1, quiet)
        work.run()
    finally:
        other.close()
    assert work.busy == ["fedavg-s1"]
    assert work.failed == {}
    assert log.read_text(encoding="utf-8") == "what the other one said"
    demo = Comparison([cell], 1, quiet, stop_at_failure=True)
    other.create(cell.config)
    try:
        demo.run()
    finally:
        other.close()
    assert "another process" in demo.failed["fedavg-s1"], "who needs every cell is told"


@pytest.mark.system
def test_a_cell_that_another_process_takes_at_the_last_moment_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands may both find a cell free; the one whose process is slower must not count it as failed."""
    [cell] = plan_cells(["fedavg"], [1], [QUICK], tmp_path)
    other = RunDirectory(cell.directory)
    start = Comparison._start

    def be_slower(self: Comparison, cell: Cell, cores: int) -> object:
        running = start(self, cell, cores)
        other.reopen()  # takes the lock, long before the new process asks for it
        return running

    monkeypatch.setattr(Comparison, "_start", be_slower)
    work = Comparison([cell], 1, quiet)
    try:
        work.run()
    finally:
        other.close()
    assert work.busy == ["fedavg-s1"]
    assert work.failed == {}
    assert work.missing(cell) == "another process is working on it"


PARENT = """
import sys
from pathlib import Path
from fedfa.experiment.sweep import Comparison, plan_cells
layer = {"rounds": 100000, "device": "cpu", "data": {"name": "digits", "clients": 10, "dir": sys.argv[2]},
         "model": {"name": "logistic"}, "cohort": {"clients": 2}, "local": {"epochs": 1}}
Comparison(plan_cells(["fedavg"], [1], [layer], Path(sys.argv[1])), 1, lambda cell, record: None).run()
"""


@pytest.mark.system
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no way to kill hard here")
def test_when_compare_is_killed_hard_its_runs_end_too(tmp_path: Path, data_dir: Path) -> None:
    """Nothing can be done in a process that is killed, so the children watch for its end themselves."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(data_dir)])
    record = RunDirectory(tmp_path / "fedavg-s1")
    try:
        _wait_until(lambda: len(record.metrics()) >= 2)
        assert record.in_use()
    finally:
        parent.kill()
        parent.wait()
    _wait_until(lambda: not record.in_use())
    assert record.summary() is None
    rounds = [one["round"] for one in record.metrics()]
    assert rounds == list(range(1, len(rounds) + 1))


def _wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def test_options_of_a_part_that_a_method_lacks_are_refused_with_the_way_to_write_them(tmp_path: Path) -> None:
    layer = {"algorithm": {"moon": {"mu": 5.0}}}
    with pytest.raises(ConfigError, match=r"'fedavg' has no component 'moon'.*--set with\.moon\.OPTION=VALUE"):
        plan_cells(["moon", "fedavg"], [1], [QUICK, layer], tmp_path)
    cells = plan_cells(["moon", "fedavg"], [1], [QUICK, {"with": {"moon": {"mu": 5.0}}}], tmp_path)
    assert cells[0].config.algorithm.options["moon"]["mu"] == 5.0
    with pytest.raises(ConfigError, match="unknown key") as caught:
        plan_cells(["moon"], [1], [QUICK, {"local": {"lrr": 1}}], tmp_path)
    assert "with." not in str(caught.value)
