"""Fork server: a process that has imported everything and forks for each message.

Flower starts a new ``flwr-clientapp`` process for every message to a site, and each imports Flower and torch, which
takes seconds of CPU time. The fork server imports them once. In the SuperNode's ``PATH`` a small program replaces
``flwr-clientapp`` (:mod:`fedfa.flower.operate.fork_server_call`); it passes arguments, environment and output
descriptors over a socket in a private directory, and a fork of the server executes the call with Flower's own code.
Each message still has its own process, which loads the app's code anew.

A program, ``python -m fedfa.flower.operate.fork_server DIRECTORY [COMMAND …]``: with a command (a SuperNode's) it also
runs that command and ends with it. A fork dies with its caller, and all forks die with the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedfa.flower.operate import fork_server_call
from fedfa.flower.operate.process_supervisor import die_with_parent, wake_on_signal

COMMAND = "flwr-clientapp"
PRELOAD = ("flwr.supernode.cli", "fedfa.flower.client_app", "fedfa.experiment.run")
"""Modules that every message needs."""
_SIGNALS = [signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP") if name in signal.Signals.__members__]
"""Requests to end; not every system has all of them."""
_REQUEST_SECONDS = 10.0
"""Time for a caller to send its request."""


def write_stand_in(directory: Path) -> None:
    """Write the program that replaces ``flwr-clientapp``; the path must be short enough for a socket's name."""
    programs = directory / "bin"
    programs.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = Path(sys.executable).parent / COMMAND
    original = str(beside) if beside.exists() else shutil.which(COMMAND) or COMMAND
    call = [sys.executable, "-I", "-S", fork_server_call.__file__, str(_socket(directory)), original]
    path = programs / COMMAND
    path.write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def fork_server_path(directory: Path) -> str:
    """``PATH`` for a SuperNode that uses the stand-in; Flower's other commands stay available."""
    return os.pathsep.join([str(directory / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def can_fork() -> bool:
    """Whether a process that has imported torch can fork safely: on Linux only."""
    return sys.platform == "linux"


class ForkServer:
    """Accepts calls and forks for each."""

    def __init__(self, directory: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        _socket(directory).unlink(missing_ok=True)
        self._listener.bind(str(_socket(directory)))
        # Calls that arrive before all imports are done wait in the queue.
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, "call")
        self._wake = wake_on_signal()
        self._selector.register(self._wake, selectors.EVENT_READ, "signal")
        self._callers: dict[int, socket.socket] = {}
        self._caught: list[int] = []
        for number in _SIGNALS:
            if number.name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN:  # respect nohup
                signal.signal(number, lambda received, _: self._caught.append(received))

    def serve(self, companion: subprocess.Popen[bytes] | None = None) -> int:
        """Serve until the companion ends or a signal asks to end; return the exit code."""
        try:
            while True:
                if companion is not None and (code := companion.poll()) is not None:
                    return code if code >= 0 else 128 - code
                if self._caught:
                    if companion is None:
                        return 0
                    companion.send_signal(self._caught.pop())
                for key, _ in self._selector.select():
                    if key.data == "signal":
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake, 512)
                    elif key.data == "call":
                        self._accept()
                    else:
                        self._caller_disconnected(int(key.data))
                self._reap()
        finally:
            for pid in self._callers:
                _kill(pid)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_SECONDS)
        descriptors: list[int] = []
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
            request = json.loads(fork_server_call.receive_exactly(connection, struct.unpack("!I", head)[0]))
            server = os.getpid()
            # Block signals to the child until it has reset the server's handlers.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                pid = os.fork()
                if pid == 0:
                    self._run_in_child(request, descriptors, server, mask)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            connection.settimeout(None)
            self._callers[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ, str(pid))
            with contextlib.suppress(OSError):  # the caller is gone: the selector reports it, and the fork is killed
                connection.sendall(struct.pack("!I", pid))
        except (OSError, ValueError, struct.error):
            connection.close()  # the caller then executes Flower's own command
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _run_in_child(
        self, request: Mapping[str, Any], descriptors: Sequence[int], server: int, mask: set[int | signal.Signals]
    ) -> NoReturn:
        """In the fork: execute the call, with this signal mask, and exit."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            die_with_parent(server)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._selector.close()
            self._listener.close()
            for connection in self._callers.values():
                connection.close()
            for target, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, target)
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = [COMMAND, *request["arguments"]]
            from flwr.supernode.cli import flwr_clientapp

            flwr_clientapp()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:  # whatever happens, the fork must not continue as the server
                os._exit(code & 0xFF)

    def _caller_disconnected(self, pid: int) -> None:
        """Kill the fork: callers never write, so this one has died."""
        _kill(pid)
        self._selector.unregister(self._callers[pid])

    def _reap(self) -> None:
        """Collect forks that ended, and report their exit codes."""
        for pid, connection in list(self._callers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):
                    connection.sendall(struct.pack("!I", code if code >= 0 else 128 - code))
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(connection)
                connection.close()
                del self._callers[pid]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _socket(directory: Path) -> Path:
    return directory / "call"


def _warm_up() -> None:
    """Make an optimiser step: torch imports much of itself at the first one."""
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()


def main(directory: Path, command: list[str]) -> int:
    """Serve, next to the command if there is one; return the exit code."""
    import importlib

    from fedfa.flower.environment import disable_telemetry

    disable_telemetry()
    write_stand_in(directory)
    environment = {**os.environ, "PATH": fork_server_path(directory)}
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # only a process with one thread forks safely
    server = ForkServer(directory)
    companion: subprocess.Popen[bytes] | None = None
    try:
        here = os.getpid()
        if command:  # dies with this process: nobody would tell it to end
            companion = subprocess.Popen(command, env=environment, preexec_fn=lambda: die_with_parent(here))
        for module in PRELOAD:
            importlib.import_module(module)
        _warm_up()
        return server.serve(companion)
    finally:
        if companion is not None and companion.poll() is None:  # the server failed; the companion must not continue
            companion.terminate()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
