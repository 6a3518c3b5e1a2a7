"""Faults from a seed: what goes wrong in a federation, when and where; the same seed gives the same faults.

:func:`schedule` draws them. :class:`FaultyGrid` does them to sites in this process, counted in calls of the server, and
:mod:`tests.flower.test_fault_schedules_real` to real processes, counted in seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import httpx
from flwr.app import Message

from tests.flower.loopback import LoopbackGrid

KINDS = (
    "delay", "error before", "error after", "lost", "twice", "reordered", "site gone", "site disk full", "clock",
    "server killed", "server disk full",
)  # fmt: skip
CALLS = 60
"""Calls of the server over which the faults are spread; a quiet run of three rounds makes some thirty."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    when: int
    """In which call of the server, or which part of the run."""
    kind: str
    site: int
    length: int
    """How many calls, or how long, it lasts."""


def schedule(seed: int, kinds: Sequence[str] = KINDS, sites: int = 4, most: int = 6) -> list[Fault]:
    """The faults of a seed, in the order of their time.

    Example:
        >>> schedule(3) == schedule(3), schedule(3) == schedule(4)
        (True, False)
    """
    draw = random.Random(seed)
    faults = [
        Fault(draw.randrange(2, CALLS), draw.choice(kinds), draw.randrange(sites), draw.randrange(1, 9))
        for _ in range(draw.randrange(1, most + 1))
    ]
    return sorted(faults, key=lambda fault: fault.when)


class ServerKilledError(BaseException):
    """The server's process died at this call."""


class FaultyGrid(LoopbackGrid):
    """Sites in this process, to which the faults of a seed happen."""

    def __init__(self, inner: LoopbackGrid, faults: Iterable[Fault]) -> None:
        super().__init__(inner.sites, inner.run_config, inner.app)
        self.faults, self.calls = list(faults), 0
        self.happened: list[str] = []
        self._gone: dict[int, int] = {}
        self._held: dict[str, int] = {}

    def _due(self, *kinds: str) -> Fault | None:
        """The next fault of these kinds whose time has come; it happens once."""
        for fault in self.faults:
            if fault.kind in kinds and fault.when <= self.calls:
                self.faults.remove(fault)
                self.happened.append(fault.kind)
                return fault
        return None

    def _call(self) -> None:
        self.calls += 1
        if self._due("server killed"):
            raise ServerKilledError

    def _node(self, fault: Fault) -> int:
        return next(node for node, config in self.sites.items() if config["partition-id"] == fault.site)

    def get_node_ids(self) -> Iterable[int]:
        self._call()
        if fault := self._due("site gone"):
            self._gone[self._node(fault)] = self.calls + fault.length
        return [node for node in self.sites if self._gone.get(node, 0) <= self.calls]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._call()
        if self._due("error before"):
            raise _error()
        messages = list(messages)
        if self._due("reordered"):
            messages, order = messages[::-1], -1
        else:
            order = 1
        numbers: list[str] = []
        for message in messages:
            fault = self._due("twice", "site disk full", "clock", "lost", "delay")
            with _fault_at_site(fault):
                if fault is not None and fault.kind == "twice":
                    list(super().push_messages([message]))
                (number,) = super().push_messages([message])
            numbers.append(number)
            if self._gone.get(message.metadata.dst_node_id, 0) > self.calls or (fault and fault.kind == "lost"):
                self._replies.pop(number, None)
            if fault is not None and fault.kind == "delay":
                self._held[number] = self.calls + fault.length
        if self._due("error after"):  # the SuperLink has stored the messages, but its answer does not arrive
            raise _error()
        return numbers[::order]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._call()
        if self._due("error before", "error after"):
            raise _error()
        ready = [number for number in message_ids if self._held.get(number, 0) <= self.calls]
        return super().pull_messages(ready)


def _error() -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://superlink")
    return httpx.HTTPStatusError("500", request=request, response=httpx.Response(500, request=request))


@contextlib.contextmanager
def _fault_at_site(fault: Fault | None) -> Iterator[None]:
    """A full disk, or a clock that is days off, while a site handles a message."""
    if fault is not None and fault.kind == "site disk full":
        with full_disk():
            yield
    elif fault is not None and fault.kind == "clock":
        off, true = (fault.length - 4) * 86400.0, time.time
        with mock.patch("time.time", lambda: true() + off):  # noqa: PT008  (a clock that goes on)
            yield
    else:
        yield


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Nothing can be flushed to the disk."""

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("os.fsync", fail):
        yield
