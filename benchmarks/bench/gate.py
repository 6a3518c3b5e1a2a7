"""Gate for interleaved measurement: all contenders stay alive, one trains while the others wait."""

from __future__ import annotations

import contextlib
import select
import socket


class Gate:
    """Holds the processes of one contender between slots; :class:`~.contender_api.Clock` is the other end.

    A process sends one byte when it has finished a slot (the first round counts as one) and waits for one byte.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._finished: dict[socket.socket, int] = {}
        """Slots finished, by process."""
        self._opened = 0

    @property
    def port(self) -> int:
        """Port at which the processes wait."""
        return int(self._server.getsockname()[1])

    def listen(self, seconds: float) -> bool:
        """Handle messages, waiting at most that long for one; return whether there was any."""
        ready, _, _ = select.select([self._server, *self._finished], [], [], seconds)
        for line in ready:
            if line is self._server:
                new, _ = line.accept()
                new.sendall(b"." * self._opened)  # other processes of the contender have passed the gate already
                self._finished[new] = 0
                continue
            received = 0
            with contextlib.suppress(OSError):
                received = len(line.recv(64))
            self._finished[line] += received
            if not received:  # the process has ended
                line.close()
                del self._finished[line]
        return bool(ready)

    def all_waiting(self) -> bool:
        """Whether every process has finished its slot."""
        while self.listen(0.0):
            pass
        return bool(self._finished) and min(self._finished.values()) > self._opened

    def open(self) -> None:
        """Let every process train one slot."""
        self._opened += 1
        for line in self._finished:
            with contextlib.suppress(OSError):
                line.sendall(b".")

    def close(self) -> None:
        """Close all connections."""
        for line in (self._server, *self._finished):
            line.close()
