"""Messages to sites and their replies, with a limit on every wait.

Flower's own ``send_and_receive`` looks for replies every three seconds. Here they are looked for more often, and handed
on as they come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import httpx

from fedfa.errors import FederationError
from fedfa.flower.environment import hush

hush()
from flwr.app import Message, RecordDict  # noqa: E402  (Flower reads the environment when it is imported)
from flwr.serverapp import Grid  # noqa: E402
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # noqa: E402

log = logging.getLogger("fedfa")

AskT = ParamSpec("AskT")
AnswerT = TypeVar("AnswerT")

_MALFORMED = (DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading bytes of a stranger can end in. Troubles of the connection, and the end of the run, are none of them."""


@dataclass(frozen=True)
class Reply:
    """What came back from a node: content, or what went wrong there."""

    node: int
    content: RecordDict | None
    problem: str = ""


class Post:
    """Sends messages through Flower's grid.

    Args:
        grid: Flower's.
        poll_seconds: How often to look for replies.
        link_seconds: How long the SuperLink may be out of reach.
    """

    def __init__(self, grid: Grid, poll_seconds: float = 0.25, link_seconds: float = 300.0) -> None:
        self.grid, self.poll_seconds, self.link_seconds = grid, poll_seconds, link_seconds
        self._one_by_one = False
        # Flower's own grid tries for ever, and has no setting for it; its runtime, too, sets the limits here.
        if (tries := getattr(grid, "_retry_invoker", None)) is not None:
            tries.max_time = link_seconds

    def nodes(self) -> set[int]:
        """The nodes that are there now."""
        return set(self._call(self.grid.get_node_ids))

    def _call(self, ask: Callable[AskT, AnswerT], *args: AskT.args, **kwargs: AskT.kwargs) -> AnswerT:
        """Ask the SuperLink.

        Raises:
            FederationError: It does not answer.
        """
        try:
            return ask(*args, **kwargs)
        except httpx.HTTPError as error:
            raise FederationError(
                f"the SuperLink has not answered for {self.link_seconds:g} s (federation.link_seconds; "
                f"{type(error).__name__}: {error}). The run goes on from its last checkpoint when it is started again"
            ) from error

    def send(self, letters: Mapping[int, RecordDict], kind: str, group: str, seconds: float) -> Mailing:
        """Send content to nodes; the replies are for :meth:`Mailing.replies`.

        Args:
            letters: Content by node.
            kind: Flower's message type, e.g. ``"train"``.
            group: For Flower's own records and logs, e.g. the round.
            seconds: After so long a message counts no more, and is not delivered either.
        """
        nodes = list(letters)
        messages = [
            Message(letters[node], dst_node_id=node, message_type=kind, ttl=max(seconds, 1.0), group_id=group)
            for node in nodes
        ]
        sent = list(self._call(self.grid.push_messages, messages)) if messages else []
        open_messages = {number: node for number, node in zip(sent, nodes, strict=False) if number}
        refused = [node for node in nodes if node not in open_messages.values()]
        return Mailing(self, open_messages, refused)

    def fetch(self, numbers: Sequence[str]) -> tuple[list[Message], dict[str, str]]:
        """The replies to these messages that have come, and of others why they cannot be read.

        Flower puts replies together before anybody can check them. It fails at one that is malformed, and the others
        of that call are lost with it. So from the first such reply on they are fetched one at a time.
        """
        if not self._one_by_one:
            try:
                return list(self._call(self.grid.pull_messages, list(numbers))), {}
            except _MALFORMED as error:
                log.warning("a reply cannot be read (%s: %s)", type(error).__name__, error)
                self._one_by_one = True
        came: list[Message] = []
        unreadable: dict[str, str] = {}
        for number in numbers:
            try:
                came += self._call(self.grid.pull_messages, [number])
            except _MALFORMED as error:
                unreadable[number] = f"its reply cannot be read ({type(error).__name__}: {error})"
        return came, unreadable


class Mailing:
    """Messages on their way. More can be added while replies are read.

    Args:
        post: Fetches replies.
        waiting: Nodes by the number of their message.
        refused: Nodes to which nothing could be sent.
    """

    def __init__(self, post: Post, waiting: dict[str, int], refused: list[int]) -> None:
        self._post, self._waiting, self._refused = post, waiting, refused

    @property
    def silent(self) -> list[int]:
        """Nodes that have not answered yet."""
        return list(self._waiting.values())

    def add(self, other: Mailing) -> None:
        """Wait for the replies to these messages too."""
        self._waiting |= other._waiting
        self._refused += other._refused

    def replies(self, until: float) -> Iterator[Reply | None]:
        """Replies as they come, None each time there is no new one; ends when all are there or the time is over.

        Args:
            until: On the clock of :func:`time.monotonic`.
        """
        while True:
            while self._refused:
                yield Reply(self._refused.pop(), None, "the message could not be sent")
            if not self._waiting:
                return
            came, unreadable = self._post.fetch(list(self._waiting))
            heard = bool(unreadable)
            for number, why in unreadable.items():
                yield Reply(self._waiting.pop(number), None, why)
            for message in came:
                node = self._waiting.pop(message.metadata.reply_to_message_id, None)
                if node is None:
                    log.warning("a reply that nobody asked for, from node %d", message.metadata.src_node_id)
                    continue
                heard = True
                if message.has_error():
                    yield Reply(node, None, message.error.reason or f"error {message.error.code}")
                else:
                    yield Reply(node, message.content)
            if not heard:
                yield None
                if time.monotonic() >= until:
                    return
                time.sleep(min(self._post.poll_seconds, max(0.0, until - time.monotonic())))
