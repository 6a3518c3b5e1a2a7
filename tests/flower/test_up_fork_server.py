"""Fork server: a call through it is equivalent to Flower's own command."""

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

from fedfa.flower.operate.fork_server import can_fork, fork_server_path, write_stand_in
from fedfa.flower.operate.process_supervisor import descendants
from fedfa.flower.operate.processes import ProcessGroup, private_environment
from tests.flower.test_up_processes import until
from tests.processes import is_running

pytest.importorskip("flwr")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not can_fork(), reason="processes that have imported torch are forked on Linux only"),
]

UNREACHABLE = ["--insecure", "--token", "x", "--runtime-api-address", "127.0.0.1:9"]
"""A call that keeps trying to reach a SuperNode that does not exist."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fedfa-", ignore_cleanup_errors=True) as short:
        yield Path(short)


@pytest.fixture(scope="module")
def fork_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Process id of a fork server."""
    log = tmp_path_factory.mktemp("fork-server") / "log"
    with ProcessGroup() as processes:
        command = [sys.executable, "-m", "fedfa.flower.operate.fork_server", str(folder)]
        server = processes.start("fork-server", command, log, private_environment(log.parent))
        assert until(lambda: (folder / "call").exists() or server.exit_code is not None, 120)
        assert server.exit_code is None, server.output()
        yield server.pids()[0]


def is_gone(process: int) -> bool:
    return not is_running(process)


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "bin" / "flwr-clientapp"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_output_and_exit_code_are_those_of_flowers_own_command(folder: Path, fork_server: int) -> None:
    own = str(Path(sys.executable).parent / "flwr-clientapp")
    for arguments in (["--help"], ["--no-such-option"]):
        expected = subprocess.run([own, *arguments], capture_output=True, text=True, timeout=300, check=False)
        got = call(folder, *arguments)
        assert (got.returncode, got.stdout, got.stderr) == (expected.returncode, expected.stdout, expected.stderr)
        assert got.stdout + got.stderr


def all_gone(processes: list[int]) -> bool:
    return all(is_gone(process) for process in processes)


def test_a_fork_dies_with_its_caller_and_receives_its_signals(folder: Path, fork_server: int) -> None:
    program = str(folder / "bin" / "flwr-clientapp")
    for number in (signal.SIGKILL, signal.SIGTERM):
        caller = subprocess.Popen([program, *UNREACHABLE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert until(lambda: bool(descendants(fork_server)), 60)
        forks = [fork.pid for fork in descendants(fork_server)]  # the fork, and what it may have started by now
        caller.send_signal(number)
        assert until(partial(all_gone, forks), 60)
        # 3 is Flower's own code after SIGTERM. Before Flower handles it, the signal itself ends the fork, or the caller
        # that has not yet received the fork's id.
        asked_to_end = (3, 128 + signal.SIGTERM, -signal.SIGTERM)
        assert caller.wait(60) in ((-signal.SIGKILL,) if number == signal.SIGKILL else asked_to_end)
    assert is_running(fork_server)


@contextlib.contextmanager
def calling(folder: Path) -> Iterator[socket.socket]:
    """A caller that has sent its request and received no answer."""
    request = json.dumps({"arguments": UNREACHABLE, "folder": str(folder), "environment": dict(os.environ)}).encode()
    with open(os.devnull, "wb") as nowhere, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(folder / "call"))
        socket.send_fds(connection, [struct.pack("!I", len(request))], [nowhere.fileno(), nowhere.fileno()])
        connection.sendall(request)
        yield connection


def test_a_signal_to_a_fork_that_has_just_started_is_not_lost(folder: Path, fork_server: int) -> None:
    for _ in range(10):
        with calling(folder) as connection:
            (fork,) = struct.unpack("!I", connection.recv(4))
            os.kill(fork, signal.SIGTERM)
            assert struct.unpack("!I", connection.recv(4))[0] in (3, 128 + signal.SIGTERM)
    assert is_running(fork_server)


def test_a_caller_that_dies_before_it_knows_its_fork_leaves_none(folder: Path, fork_server: int) -> None:
    os.kill(fork_server, signal.SIGSTOP)  # so that it accepts the calls after all callers have died
    try:
        for _ in range(3):
            with calling(folder):
                pass
    finally:
        os.kill(fork_server, signal.SIGCONT)
    assert call(folder, "--help").returncode == 0  # accepted after those
    assert until(lambda: not descendants(fork_server), 60)
    assert is_running(fork_server)


def test_without_a_fork_server_the_call_executes_flowers_own_command(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fedfa-") as short:
        write_stand_in(Path(short))
        done = call(Path(short), "--help")
        assert done.returncode == 0
        assert "Run a Flower ClientApp" in done.stdout
        assert fork_server_path(Path(short)).split(os.pathsep)[0] == f"{short}/bin"
