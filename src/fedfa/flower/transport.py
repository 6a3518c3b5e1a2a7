"""Requests to sites and their replies, with a deadline on every wait.

Flower's own ``send_and_receive`` polls every three seconds. This transport polls more often and yields replies as they
arrive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import httpx

from fedfa.errors import FederationError
from fedfa.flower.environment import disable_telemetry

disable_telemetry()
from flwr.app import Message, RecordDict  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.serverapp import Grid  # noqa: E402
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # noqa: E402

log = logging.getLogger("fedfa")

CallT = ParamSpec("CallT")
ResultT = TypeVar("ResultT")

_MALFORMED = (DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors from decoding untrusted bytes. Connection errors and the end of the run are not among them."""


@dataclass(frozen=True)
class Reply:
    """Reply of a node: content, or the problem that occurred there."""

    node: int
    content: RecordDict | None
    problem: str = ""


class Transport:
    """Sends messages through Flower's grid."""

    def __init__(self, grid: Grid, poll_seconds: float = 0.25, link_seconds: float = 300.0) -> None:
        self.grid, self.poll_seconds, self.link_seconds = grid, poll_seconds, link_seconds
        self._one_by_one = False
        # Flower's own grid retries forever and has no option for it; Flower's runtime sets the limits here, too.
        if (retries := getattr(grid, "_retry_invoker", None)) is not None:
            retries.max_time = link_seconds

    def nodes(self) -> set[int]:
        """Nodes that are connected now."""
        return set(self._call(self.grid.get_node_ids))

    def _call(self, function: Callable[CallT, ResultT], *args: CallT.args, **kwargs: CallT.kwargs) -> ResultT:
        """Call the SuperLink.

        Raises:
            FederationError: It does not answer.
        """
        try:
            return function(*args, **kwargs)
        except httpx.HTTPError as error:
            raise FederationError(
                f"the SuperLink has not answered for {self.link_seconds:g} s (federation.link_seconds; "
                f"{type(error).__name__}: {error}). Start the run again to continue from its last checkpoint"
            ) from error

    def send(self, requests: Mapping[int, RecordDict], kind: str, group: str, seconds: float) -> PendingReplies:
        """Send a request to each node.

        Args:
            requests: Content by node.
            kind: Flower's message type, e.g. ``"train"``.
            group: Group id for Flower's own records and logs, e.g. the round.
            seconds: Lifetime of the messages; Flower does not deliver them afterwards.
        """
        nodes = list(requests)
        messages = [
            Message(requests[node], dst_node_id=node, message_type=kind, ttl=max(seconds, 1.0), group_id=group)
            for node in nodes
        ]
        sent = list(self._call(self.grid.push_messages, messages)) if messages else []
        waiting = {message_id: node for message_id, node in zip(sent, nodes, strict=False) if message_id}
        return PendingReplies(self, waiting, [node for node in nodes if node not in waiting.values()])

    def fetch(self, message_ids: Sequence[str]) -> tuple[list[Message], dict[str, str]]:
        """Replies to these messages that have arrived, and the problems of those that cannot be decoded.

        Flower decodes a batch of replies before we can check them: one malformed reply fails the call and loses the
        others. From the first malformed reply on, replies are therefore fetched one at a time.
        """
        if not self._one_by_one:
            try:
                return list(self._call(self.grid.pull_messages, list(message_ids))), {}
            except _MALFORMED as error:
                log.warning("a reply cannot be read (%s: %s)", type(error).__name__, error)
                self._one_by_one = True
        arrived: list[Message] = []
        unreadable: dict[str, str] = {}
        for message_id in message_ids:
            try:
                arrived += self._call(self.grid.pull_messages, [message_id])
            except _MALFORMED as error:
                unreadable[message_id] = f"its reply cannot be read ({type(error).__name__}: {error})"
        return arrived, unreadable


class PendingReplies:
    """Requests that wait for replies. More can be added while replies are read."""

    def __init__(self, transport: Transport, waiting: dict[str, int], unsent: list[int]) -> None:
        self._transport, self._waiting, self._unsent = transport, waiting, unsent

    @property
    def unanswered(self) -> list[int]:
        """Nodes that have not replied yet."""
        return list(self._waiting.values())

    def add(self, other: PendingReplies) -> None:
        """Wait for these replies too."""
        self._waiting |= other._waiting
        self._unsent += other._unsent

    def replies(self, deadline: float) -> Iterator[Reply | None]:
        """Yield replies as they arrive, and None after each poll without one, until all arrived or time is up.

        Args:
            deadline: On the clock of :func:`time.monotonic`.
        """
        while True:
            while self._unsent:
                yield Reply(self._unsent.pop(), None, "the message could not be sent")
            if not self._waiting:
                return
            arrived, unreadable = self._transport.fetch(list(self._waiting))
            progress = bool(unreadable)
            for message_id, why in unreadable.items():
                yield Reply(self._waiting.pop(message_id), None, why)
            for message in arrived:
                node = self._waiting.pop(message.metadata.reply_to_message_id, None)
                if node is None:
                    log.warning("node %d sent a reply without a request", message.metadata.src_node_id)
                    continue
                progress = True
                if message.has_error():
                    yield Reply(node, None, message.error.reason or f"error {message.error.code}")
                else:
                    yield Reply(node, message.content)
            if not progress:
                yield None
                if time.monotonic() >= deadline:
                    return
                time.sleep(min(self._transport.poll_seconds, max(0.0, deadline - time.monotonic())))
