"""Warm starts: a process that has everything imported and forks for each message.

Flower starts a new ``flwr-clientapp`` process for every message to a site, and each imports Flower and torch anew:
seconds of processor time before the first step of training. Here one process imports them once. In the SuperNode's
``PATH`` a small program stands for ``flwr-clientapp`` (:mod:`fedfa.flower.operate.warm_call`); it hands arguments,
environment and output over a socket in a private folder, and a fork of the warm process carries the call out, with
Flower's own code from there on. Each message still has a process of its own, with the app's code loaded fresh.

A program, ``python -m fedfa.flower.operate.warm FOLDER [COMMAND …]``: with a command (a SuperNode's) it runs that
beside and ends with it. The fork dies if the caller does, and all forks die with the warm process.
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

from fedfa.flower.operate.box import die_with

COMMAND = "flwr-clientapp"
PRELOAD = ("flwr.supernode.cli", "fedfa.flower.client_app", "fedfa.studies.run")
"""What every message needs."""
_CALL = Path(__file__).with_name("warm_call.py")
_SIGNALS = [signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP") if name in signal.Signals.__members__]
"""Requests to end; not every system has all of them."""
_HEARING = 10.0
"""Seconds for a caller to say what it wants."""


def prepare_folder(folder: Path) -> None:
    """Write the program that stands for ``flwr-clientapp``.

    Args:
        folder: Private to this user; the path must be short enough for a socket's name.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True, mode=0o700)
    original = _original()
    call = [sys.executable, "-I", "-S", str(_CALL), str(_socket(folder)), original]
    path = programs / COMMAND
    path.write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def warm_path(folder: Path) -> str:
    """The ``PATH`` for a SuperNode that shall use the program in this folder; Flower's commands stay within reach."""
    return os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def can_fork() -> bool:
    """Whether warm starts work here: forking a process that has imported torch is safe on Linux only."""
    return sys.platform == "linux"


class WarmProcess:
    """Accepts calls and forks for each.

    Args:
        folder: Where the socket goes.
    """

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        _socket(folder).unlink(missing_ok=True)
        self._listener.bind(str(_socket(folder)))
        # Who calls before everything is imported waits in the queue.
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, "call")
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._wake = wake
        self._selector.register(wake, selectors.EVENT_READ, "signal")
        self._callers: dict[int, socket.socket] = {}
        self._asked: list[int] = []
        for number in _SIGNALS:
            if number.name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                signal.signal(number, lambda caught, _: self._asked.append(caught))
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self, companion: subprocess.Popen[bytes] | None = None) -> int:
        """Until the companion ends, or somebody asks to end; the exit code."""
        try:
            while True:
                if companion is not None and (code := companion.poll()) is not None:
                    return code if code >= 0 else 128 - code
                if self._asked:
                    if companion is None:
                        return 0
                    companion.send_signal(self._asked.pop())
                for key, _ in self._selector.select():
                    if key.data == "signal":
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake, 512)
                    elif key.data == "call":
                        self._accept()
                    else:
                        self._caller_is_gone(int(key.data))
                self._fetch_ended(companion)
        finally:
            for process in self._callers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_HEARING)
        descriptors: list[int] = []
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
            request = json.loads(_exactly(connection, struct.unpack("!I", head)[0]))
            warm = os.getpid()
            # A signal to the fork must wait until it no longer has our way of answering signals.
            usual = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                process = os.fork()
                if process == 0:
                    self._become(request, descriptors, warm, usual)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, usual)
            connection.settimeout(None)
            self._callers[process] = connection
            self._selector.register(connection, selectors.EVENT_READ, str(process))
            with contextlib.suppress(OSError):  # it is gone; the selector will tell, and the fork be ended
                connection.sendall(struct.pack("!I", process))
        except (OSError, ValueError, struct.error):
            connection.close()  # the caller then starts Flower's own command
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _become(
        self, request: Mapping[str, Any], descriptors: Sequence[int], warm: int, mask: set[int | signal.Signals]
    ) -> NoReturn:
        """In the fork: be what the caller asked for, with this mask of signals."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            die_with(warm)
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
            finally:  # whatever happens: the fork must not go on as the warm process
                os._exit(code & 0xFF)

    def _caller_is_gone(self, process: int) -> None:
        """It never writes: so it was killed, and what it asked for shall not go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        self._selector.unregister(self._callers[process])

    def _fetch_ended(self, companion: subprocess.Popen[bytes] | None) -> None:
        for process, connection in list(self._callers.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):
                    connection.sendall(struct.pack("!I", code if code >= 0 else 128 - code))
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(connection)
                connection.close()
                del self._callers[process]


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionError("the caller is gone")
        received += part
    return bytes(received)


def _socket(folder: Path) -> Path:
    return folder / "call"


def _original() -> str:
    beside = Path(sys.executable).parent / COMMAND
    return str(beside) if beside.exists() else shutil.which(COMMAND) or COMMAND


def _make_a_step() -> None:
    """Torch imports much of itself when an optimiser makes its first step."""
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()


def main(folder: Path, command: list[str]) -> int:
    """Run the command with warm starts; its exit code."""
    import importlib

    from fedfa.flower.environment import hush

    hush()
    prepare_folder(folder)
    environment = {**os.environ, "PATH": warm_path(folder)}
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # only a process with one thread forks safely
    warm = WarmProcess(folder)
    companion: subprocess.Popen[bytes] | None = None
    try:
        companion = subprocess.Popen(command, env=environment) if command else None
        for module in PRELOAD:
            importlib.import_module(module)
        _make_a_step()
        return warm.serve(companion)
    finally:
        if companion is not None and companion.poll() is None:  # we failed, and it shall not go on alone
            companion.terminate()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
