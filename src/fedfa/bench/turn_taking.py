"""Turns for contenders that are all alive: one works while the others wait, without asking again and again."""

from __future__ import annotations

import contextlib
import select
import socket


class Turns:
    """Where the processes of one contender wait for their turns, see :class:`fedfa.bench.plain.Clock`."""

    def __init__(self) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self._marks: dict[socket.socket, int] = {}
        """Turns ended (the first round is one), of each process."""
        self._given = 0

    @property
    def port(self) -> int:
        """Where to ask for a turn."""
        return int(self._door.getsockname()[1])

    def listen(self, seconds: float) -> bool:
        """Wait for news, at most that long; whether there were none."""
        ready, _, _ = select.select([self._door, *self._marks], [], [], seconds)
        for line in ready:
            if line is self._door:
                new, _ = line.accept()
                new.sendall(b"." * self._given)  # of turns that others of the contender have had meanwhile
                self._marks[new] = 0
            elif said := _received(line):
                self._marks[line] += said
            else:  # that process has ended
                line.close()
                del self._marks[line]
        return not ready

    def wanted(self) -> bool:
        """Whether all have ended the last turn that was given."""
        while not self.listen(0.0):
            pass
        return bool(self._marks) and min(self._marks.values()) > self._given

    def give(self) -> None:
        """One turn more for each."""
        self._given += 1
        for line in self._marks:
            with contextlib.suppress(OSError):
                line.sendall(b".")

    def close(self) -> None:
        """No more turns."""
        for line in (self._door, *self._marks):
            line.close()


def _received(line: socket.socket) -> int:
    try:
        return len(line.recv(64))
    except OSError:
        return 0
