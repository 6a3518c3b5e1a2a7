"""Supervised processes: none is left running, however the parent ends. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedfa.flower.operate.processes import OperationError, ProcessGroup, SupervisedProcess, log_excerpt
from tests.processes import is_running

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Flower's processes do not run on Windows")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent death signal")

STUBBORN_FAMILY = """
import os, signal, sys, time
def settle(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
    open(os.path.join(sys.argv[1], name), "w").write(str(os.getpid()))
    time.sleep(100)
if os.fork() == 0:                       # a child in a session of its own, as Flower starts its executors
    os.setsid()
    if os.fork() == 0: settle("orphan")  # whose parent ends at once: an orphan
    os._exit(0)
if os.fork() == 0:
    os.setsid(); settle("detached")
settle("first")
"""
NAMES = ("first", "detached", "orphan")


def until(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def members(folder: Path) -> list[int]:
    """Process ids of the family, once all of it runs."""
    files = [folder / name for name in NAMES]
    assert until(lambda: all(file.exists() and file.read_text() for file in files))
    found = [int(file.read_text()) for file in files]
    assert all(is_running(process) for process in found)
    return found


@pytest.fixture
def processes() -> Iterator[ProcessGroup]:
    with ProcessGroup(grace=0.5) as started:
        yield started


def start_family(processes: ProcessGroup, folder: Path) -> SupervisedProcess:
    return processes.start("family", [sys.executable, "-c", STUBBORN_FAMILY, str(folder)], folder / "log", os.environ)


def test_the_process_group_ends_detached_and_stubborn_processes(
    tmp_path: Path,
) -> None:
    with ProcessGroup(grace=0.5) as processes:
        process = start_family(processes, tmp_path)
        family = members(tmp_path)
        assert set(family) <= set(process.pids())
    assert not any(is_running(process) for process in family)
    assert process.exit_code == 128 + signal.SIGKILL


def test_the_process_group_ends_all_processes_after_an_error(tmp_path: Path) -> None:
    family: list[int] = []

    def troubled() -> None:
        with ProcessGroup(grace=0.2) as processes:
            start_family(processes, tmp_path)
            family.extend(members(tmp_path))
            raise RuntimeError("trouble")

    with pytest.raises(RuntimeError, match="trouble"):
        troubled()
    assert family
    assert not any(is_running(process) for process in family)


def test_kill_is_immediate(processes: ProcessGroup, tmp_path: Path) -> None:
    process = start_family(processes, tmp_path)
    family = members(tmp_path)
    started = time.monotonic()
    process.kill()
    assert time.monotonic() - started < 5
    assert not any(is_running(process) for process in family)


OPENER = """
import os, sys, time
from pathlib import Path
from fedfa.flower.operate.processes import ProcessGroup
processes = ProcessGroup(grace=0.3)
processes.start("family", [sys.executable, "-c", sys.argv[2], sys.argv[1]], Path(sys.argv[1]) / "log", os.environ)
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_supervised_processes_do_not_outlive_a_killed_parent(tmp_path: Path, number: int) -> None:
    opener = subprocess.Popen([sys.executable, "-c", OPENER, str(tmp_path), STUBBORN_FAMILY], stderr=subprocess.DEVNULL)
    try:
        family = members(tmp_path)
        opener.send_signal(number)
        opener.wait(10)
        assert until(lambda: not any(is_running(process) for process in family))
    finally:
        opener.kill()
        opener.wait(10)


@linux_only
def test_the_command_dies_with_a_killed_supervisor(processes: ProcessGroup, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(100)"]
    process = processes.start("sleeper", command, tmp_path / "log", os.environ)
    assert until(lambda: "here" in process.output())
    (sleeper,) = process.pids()
    os.kill(int(Path(f"/proc/{sleeper}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert until(lambda: not is_running(sleeper), 5)


def test_exit_codes_and_output_come_through(processes: ProcessGroup, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert processes.start("one", [sys.executable, "-c", "print('first'); exit(7)"], log, os.environ).wait(10) == 7
    killed = [sys.executable, "-c", "import os; print('second', flush=True); os.kill(os.getpid(), 9)"]
    second = processes.start("one", killed, log, os.environ)
    assert second.wait(10) == 128 + 9
    assert second.output() == "second\n", "only its own output"
    assert log.read_text() == "first\nsecond\n"
    missing = processes.start("two", ["no-such-command"], tmp_path / "two", os.environ)
    assert missing.wait(10) == 127
    assert "no-such-command: No such file" in missing.output()


def test_a_running_process_is_not_started_twice(processes: ProcessGroup, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    processes.start("one", command, tmp_path / "log", os.environ)
    with pytest.raises(OperationError, match="one is already running"):
        processes.start("one", command, tmp_path / "log", os.environ)


def test_waiting_ends_with_a_needed_process_and_quotes_its_log(processes: ProcessGroup, tmp_path: Path) -> None:
    script = "print('getting ready'); raise SystemExit('error: port 8000 is taken')"
    process = processes.start("server", [sys.executable, "-c", script], tmp_path / "server.log", os.environ)
    with pytest.raises(
        OperationError, match=r"(?s)server ended \(exit code 1\) while waiting for an answer.*port 8000"
    ):
        processes.wait_for("an answer", lambda: False, seconds=30, needed=[process])


def test_waiting_has_a_limit(processes: ProcessGroup, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('thinking', flush=True); time.sleep(100)"]
    process = processes.start("thinker", command, tmp_path / "log", os.environ)
    assert until(lambda: "thinking" in process.output())
    with pytest.raises(OperationError, match=r"(?s)timed out after 0 s waiting for an answer.*thinking"):
        processes.wait_for("an answer", lambda: False, seconds=0.3, needed=[process])


def test_a_log_excerpt_shows_lines_around_the_error_without_colours(processes: ProcessGroup, tmp_path: Path) -> None:
    script = """
for number in range(50): print("\\033[92mINFO \\033[0m: all is well", number)
print("Traceback (most recent call last):\\n  somewhere\\nRuntimeError: too few sites")
for number in range(50): print("INFO: going down", number)
"""
    process = processes.start("run", [sys.executable, "-c", script], tmp_path / "run.log", os.environ)
    assert process.wait(10) == 0
    excerpt = log_excerpt(process)
    assert "RuntimeError: too few sites" in excerpt
    assert "\x1b" not in excerpt
    assert excerpt.count("\n") < 15
    assert str(tmp_path / "run.log") in excerpt
