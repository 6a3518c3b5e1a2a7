"""Requests to sites and their replies, with a deadline on every wait.

Flower's own ``send_and_receive`` polls every three seconds, and its ``pull_messages`` waits for an upload that has
begun, for minutes if the site freezes. This transport polls more often, yields replies as they arrive, and takes an
upload piece by piece: one that is too large is refused before it is read, and none lasts longer than the deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import httpx

from fedfa.errors import FederationError
from fedfa.flower.environment import disable_telemetry
from fedfa.flower.messages import BadMessageError, printable

disable_telemetry()
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from google.protobuf.message import DecodeError

log = logging.getLogger("fedfa")

CallT = ParamSpec("CallT")
ResultT = TypeVar("ResultT")

_MALFORMED = (DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors from decoding untrusted bytes. Connection errors and the end of the run are not among them."""
_MOST_OBJECTS = 64
"""Parts of a reply beside its pieces of data; ours have fewer than ten."""
_PIECE_BYTES = 2**20
"""Flower cuts arrays into pieces; a reply may have as many parts as if they were this small."""
_SMALL_REPLY = 2**24
"""Bytes of a reply without tensors."""
_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Reply:
    """Reply of a node: content, or the problem that occurred there."""

    node: int
    content: RecordDict | None
    problem: str = ""


@dataclass
class _Upload:
    """A reply whose parts are being uploaded."""

    message_id: str
    parts: list[str]
    """Ids of the parts that are not here yet."""
    contents: dict[str, bytes] = field(default_factory=dict)


class Transport:
    """Sends messages through Flower's grid."""

    def __init__(self, grid: Grid, poll_seconds: float = 0.25, link_seconds: float = 300.0) -> None:
        self.grid, self.poll_seconds, self.link_seconds = grid, poll_seconds, link_seconds
        self.largest_reply = _SMALL_REPLY
        """Largest number of bytes that is read of one reply."""
        self._uploads: dict[str, _Upload] = {}
        # Flower's own grid retries forever and has no option for it; Flower's runtime sets the limits here, too.
        if (retries := getattr(grid, "_retry_invoker", None)) is not None:
            retries.max_time = link_seconds

    def nodes(self) -> dict[int, bytes]:
        """Nodes that are connected now, each with its public key where the grid tells it."""
        return {int(node.node_id): bytes(node.public_key) for node in self._call(self.grid.get_nodes)}

    def expect(self, nbytes: int) -> None:
        """Read replies with this many bytes of tensors, and no larger ones."""
        self.largest_reply = _SMALL_REPLY + 2 * nbytes

    def _call(self, function: Callable[CallT, ResultT], *args: CallT.args, **kwargs: CallT.kwargs) -> ResultT:
        """Call the SuperLink; repeat calls to which it answers with an error of its own (a locked database).

        Raises:
            FederationError: It does not answer, or answers with errors for too long.
        """
        deadline = time.monotonic() + self.link_seconds
        while True:
            try:
                return function(*args, **kwargs)
            except httpx.HTTPError as error:
                failed = isinstance(error, httpx.HTTPStatusError) and error.response.status_code >= 500
                if not failed or time.monotonic() + _RETRY_SECONDS > deadline:
                    raise FederationError(
                        f"the SuperLink has not answered for {self.link_seconds:g} s (federation.link_seconds; "
                        f"{_first_line(error)}). Start the run again to continue from its last checkpoint"
                    ) from error
                log.warning("the SuperLink failed (%s); asking again", _first_line(error))
                time.sleep(_RETRY_SECONDS)

    def send(self, requests: Mapping[int, RecordDict], kind: str, group: str, seconds: float) -> PendingReplies:
        """Send a request to each node.

        Args:
            requests: Content by node.
            kind: Flower's message type, e.g. ``"train"``.
            group: Group id for Flower's own records and logs, e.g. the round.
            seconds: Lifetime of the messages; Flower does not deliver them afterwards.
        """
        nodes = list(requests)

        def push() -> list[str]:  # with new messages each time: the SuperLink may have stored those of a failed call
            messages = [
                Message(requests[node], dst_node_id=node, message_type=kind, ttl=max(seconds, 1.0), group_id=group)
                for node in nodes
            ]
            return list(self.grid.push_messages(messages))

        sent = self._call(push) if nodes else []
        waiting = {message_id: node for message_id, node in zip(sent, nodes, strict=False) if message_id}
        return PendingReplies(self, waiting, [node for node in nodes if node not in waiting.values()])

    def fetch(self, message_ids: Sequence[str]) -> tuple[dict[str, Message], dict[str, str]]:
        """By request: replies that have arrived, and the problems of those that cannot be read."""
        if not hasattr(self.grid, "_runtime_client"):
            return self._fetch_whole(message_ids)
        client: Any = self.grid._runtime_client
        # Once: the SuperLink forgets a request whose reply it has announced, and would call it lost.
        asked = [message_id for message_id in message_ids if message_id not in self._uploads]
        if asked:
            answer = self._call(client.PullMessages, PullAppMessagesRequest(message_ids=asked))
            for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                parts = [part.object_id for part in iterate_object_tree(tree)]
                self._uploads[message.metadata.reply_to_message_id] = _Upload(message.metadata.message_id, parts)
        arrived: dict[str, Message] = {}
        unreadable: dict[str, str] = {}
        for message_id in message_ids:
            try:
                if message_id in self._uploads and (whole := self._take(self._uploads[message_id], client)) is not None:
                    arrived[message_id] = whole
                    del self._uploads[message_id]
            except (*_MALFORMED, BadMessageError, ObjectPullError) as error:
                unreadable[message_id] = printable(f"its reply cannot be read ({type(error).__name__}: {error})")
                del self._uploads[message_id]
        return arrived, unreadable

    def _fetch_whole(self, message_ids: Sequence[str]) -> tuple[dict[str, Message], dict[str, str]]:
        """Fetch one reply at a time: a malformed one fails the call, and would lose the others."""
        arrived: dict[str, Message] = {}
        unreadable: dict[str, str] = {}
        for message_id in message_ids:
            try:
                for reply in self._call(self.grid.pull_messages, [message_id]):
                    arrived[message_id] = reply
            except _MALFORMED as error:
                unreadable[message_id] = printable(f"its reply cannot be read ({type(error).__name__}: {error})")
        return arrived, unreadable

    def _take(self, upload: _Upload, client: Any) -> Message | None:
        """Take the parts that are there; return the message once it is whole."""
        grid: Any = self.grid
        if len(upload.parts) + len(upload.contents) > _MOST_OBJECTS + self.largest_reply // _PIECE_BYTES:
            raise BadMessageError(f"it has {len(upload.parts)} parts")
        pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, grid.run.run_id)
        while upload.parts:
            try:
                upload.contents[upload.parts[-1]] = self._call(pull, upload.parts[-1])
            except ObjectUnavailableError:
                return None
            upload.parts.pop()
            if sum(map(len, upload.contents.values())) > self.largest_reply:
                raise BadMessageError(f"it has more than {self.largest_reply} bytes")
        confirmation = ConfirmMessageReceivedRequest(
            node=grid.node, run_id=grid.run.run_id, message_object_id=upload.message_id
        )
        self._call(client.ConfirmMessageReceived, confirmation)
        message = inflate_object_from_contents(upload.message_id, upload.contents)
        if not isinstance(message, Message):
            raise BadMessageError("it is not a message")
        message.metadata.__dict__["_message_id"] = upload.message_id
        return message


def _first_line(error: Exception) -> str:
    return printable(str(error).partition("\n")[0]) or type(error).__name__


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
            for message_id, why in unreadable.items():
                yield Reply(self._waiting.pop(message_id), None, why)
            progress = bool(unreadable or arrived)
            for message_id, message in arrived.items():
                node = self._waiting.pop(message_id)
                if message.has_error():
                    yield Reply(node, None, printable(message.error.reason or f"error {message.error.code}"))
                else:
                    yield Reply(node, message.content)
            if not progress:
                yield None
                if time.monotonic() >= deadline:
                    return
                time.sleep(min(self._transport.poll_seconds, max(0.0, deadline - time.monotonic())))
