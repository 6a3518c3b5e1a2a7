"""Stand-in for ``flwr-clientapp``: passes the call to a fork server; see :mod:`fedfa.flower.operate.fork_server`.

Needs the standard library only, because it runs for every message. If no fork server answers, it executes Flower's own
command, which is slower but equivalent.
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
    """Have the command executed; return its exit code."""
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(socket_path)
        request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
        socket.send_fds(connection, [struct.pack("!I", len(request))], [1, 2])
        connection.sendall(request)
        pid = _read_number(connection)
    except OSError:
        os.execv(command, [command, *arguments])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda caught, _: _forward(pid, caught))
    return _read_number(connection)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Read this many bytes.

    Raises:
        ConnectionError: The other side closed the connection.
    """
    received = bytearray()
    while len(received) < count:
        chunk = connection.recv(count - len(received))
        if not chunk:
            raise ConnectionError("the other process is gone")
        received += chunk
    return bytes(received)


def _read_number(connection: socket.socket) -> int:
    return int(struct.unpack("!I", receive_exactly(connection, 4))[0])


def _forward(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
    except ConnectionError:
        sys.exit(1)
