"""Warm starts: a call through the warm process is as good as one of Flower's own command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fedfa.flower.operate.box import below
from fedfa.flower.operate.processes import Processes, private_environment
from fedfa.flower.operate.warm import can_fork, prepare_folder, warm_path
from tests.flower.test_up_processes import until
from tests.processes import is_running

pytest.importorskip("flwr")
pytestmark = [
    pytest.mark.federation,
    pytest.mark.skipif(not can_fork(), reason="processes that have imported torch are forked on Linux only"),
]

ASKS_NOBODY = ["--insecure", "--token", "x", "--runtime-api-address", "127.0.0.1:9"]
"""A call that goes on trying to reach a SuperNode that is not there."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fedfa-", ignore_cleanup_errors=True) as short:
        yield Path(short)


@pytest.fixture(scope="module")
def warm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The number of a warm process."""
    log = tmp_path_factory.mktemp("warm") / "warm.log"
    with Processes() as processes:
        command = [sys.executable, "-m", "fedfa.flower.operate.warm", str(folder)]
        box = processes.start("warm", command, log, private_environment(log.parent))
        assert until(lambda: (folder / "call").exists() or box.exit_code is not None, 120)
        assert box.exit_code is None, box.output()
        yield box.processes()[0]


def is_gone(process: int) -> bool:
    return not is_running(process)


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "bin" / "flwr-clientapp"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_output_and_exit_code_are_those_of_flowers_own_command(folder: Path, warm: int) -> None:
    own = str(Path(sys.executable).parent / "flwr-clientapp")
    for arguments in (["--help"], ["--no-such-option"]):
        expected = subprocess.run([own, *arguments], capture_output=True, text=True, timeout=300, check=False)
        got = call(folder, *arguments)
        assert (got.returncode, got.stdout, got.stderr) == (expected.returncode, expected.stdout, expected.stderr)
        assert got.stdout + got.stderr


def all_gone(processes: list[int]) -> bool:
    return all(is_gone(process) for process in processes)


def test_the_fork_dies_with_its_caller_and_passes_signals_on(folder: Path, warm: int) -> None:
    program = str(folder / "bin" / "flwr-clientapp")
    for number in (signal.SIGKILL, signal.SIGTERM):
        caller = subprocess.Popen([program, *ASKS_NOBODY], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert until(lambda: bool(list(below(warm))), 60)
        forks = list(below(warm))  # the fork, and what it may have started by now
        caller.send_signal(number)
        assert until(partial(all_gone, forks), 60)
        # 3 is Flower's own code for a request to end; before it listens to such, the signal itself ends it, and ends
        # the caller that has not yet heard who works for it.
        asked_to_end = (3, 128 + signal.SIGTERM, -signal.SIGTERM)
        assert caller.wait(60) in ((-signal.SIGKILL,) if number == signal.SIGKILL else asked_to_end)
    assert is_running(warm)


@contextlib.contextmanager
def calling(folder: Path) -> Iterator[socket.socket]:
    """A caller that has said what it wants, and has not heard an answer."""
    request = json.dumps({"arguments": ASKS_NOBODY, "folder": str(folder), "environment": dict(os.environ)}).encode()
    with open(os.devnull, "wb") as nowhere, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(folder / "call"))
        socket.send_fds(connection, [struct.pack("!I", len(request))], [nowhere.fileno(), nowhere.fileno()])
        connection.sendall(request)
        yield connection


def test_a_signal_to_a_fork_that_has_hardly_begun_is_not_lost(folder: Path, warm: int) -> None:
    for _ in range(10):
        with calling(folder) as connection:
            (fork,) = struct.unpack("!I", connection.recv(4))
            os.kill(fork, signal.SIGTERM)
            assert struct.unpack("!I", connection.recv(4))[0] in (3, 128 + signal.SIGTERM)
    assert is_running(warm)


def test_a_caller_that_is_gone_before_it_hears_of_its_fork_leaves_none(folder: Path, warm: int) -> None:
    os.kill(warm, signal.SIGSTOP)  # so that it takes the calls when all callers are gone
    try:
        for _ in range(3):
            with calling(folder):
                pass
    finally:
        os.kill(warm, signal.SIGCONT)
    assert call(folder, "--help").returncode == 0  # taken after those
    assert until(lambda: not list(below(warm)), 60)
    assert is_running(warm)


def test_without_a_warm_process_the_call_becomes_flowers_own_command(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fedfa-") as short:
        prepare_folder(Path(short))
        done = call(Path(short), "--help")
        assert done.returncode == 0
        assert "Run a Flower ClientApp" in done.stdout
        assert warm_path(Path(short)).split(os.pathsep)[0] == f"{short}/bin"
