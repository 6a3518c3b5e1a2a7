"""What SuperNodes find as ``flwr-clientapp``: hands the call to a warm process; see :mod:`fedfa.flower.operate.warm`.

Needs the standard library only. Where no warm process answers, it becomes Flower's own command: slower, but the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys


def main(socket_path: str, command: str, arguments: list[str]) -> int:
    """Have the command carried out; its exit code."""
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(socket_path)
        request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
        socket.send_fds(connection, [struct.pack("!I", len(request))], [1, 2])
        connection.sendall(request)
        process = _number(connection)
    except OSError:
        os.execv(command, [command, *arguments])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda caught, _: _forward(process, caught))
    return _number(connection)


def _number(connection: socket.socket) -> int:
    received = b""
    while len(received) < 4:
        part = connection.recv(4 - len(received))
        if not part:
            raise ConnectionError("the warm process is gone")
        received += part
    return int(struct.unpack("!I", received)[0])


def _forward(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
    except ConnectionError:
        sys.exit(1)
