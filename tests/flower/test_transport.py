"""Flower's own connection, to a small server: errors are retried, frozen and huge uploads are not waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedfa.errors import FederationError
from fedfa.flower.transport import PendingReplies, Reply, Transport
from tests.flower.loopback import enter_run


class SuperLink:
    """Answers for one reply: its tree, and those of its parts that have been uploaded."""

    def __init__(self, reply: Message | None = None, failures: int = 0, missing: int = 0) -> None:
        self.failures, self.calls = failures, list[str]()
        self._sent = False
        self.contents: dict[str, bytes] = {}
        self.tree = ObjectTree()
        if reply is not None:
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                self.tree = get_object_tree(reply)
                self.contents = {key: part.deflate() for key, part in get_all_nested_objects(reply).items()}
            for key in list(self.contents)[:missing]:
                self.contents[key] = b""

    def answer(self, path: str, body: bytes) -> bytes | None:
        self.calls.append(path)
        if self.failures:
            self.failures -= 1
            return None
        if path == "get-nodes":
            return bytes(GetNodesResponse(nodes=[NodeInfo(node_id=7, public_key=b"key")]).SerializeToString())
        if path == "pull-messages":
            response = PullAppMessagesResponse()
            asked = PullAppMessagesRequest.FromString(body).message_ids
            assert not (self._sent and asked), "Flower answers a second request with an error"
            if not self._sent:
                self._sent = True
                metadata = response.messages_list.add().metadata
                metadata.message_id = self.tree.object_id
                metadata.reply_to_message_id = asked[0]
                response.message_object_trees.append(self.tree)
            return bytes(response.SerializeToString())
        if path == "pull-object":
            content = self.contents[PullObjectRequest.FromString(body).object_id]
            found = PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)
            return bytes(found.SerializeToString())
        return b""


@contextlib.contextmanager
def serving(superlink: SuperLink, link_seconds: float = 20.0) -> Iterator[Transport]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = superlink.answer(self.path.rpartition("/")[2], body)
            self.send_response(500 if answer is None else 200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer or b"")))
            self.end_headers()
            self.wfile.write(answer or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    grid = HttpGrid(f"127.0.0.1:{server.server_port}", insecure=True, token="any")
    grid.set_run(Run.create_empty(1))
    try:
        with contextlib.closing(grid):
            yield Transport(grid, 0.05, link_seconds)
    finally:
        server.shutdown()
        server.server_close()


def reply_with(content: RecordDict) -> Message:
    enter_run(7)
    return Message(content, dst_node_id=1, message_type="train")


def test_errors_of_the_superlink_are_retried() -> None:
    with serving(SuperLink(failures=2)) as transport:
        assert transport.nodes() == {7: b"key"}


def test_errors_that_do_not_end_are_reported() -> None:
    with (
        serving(SuperLink(failures=10**6), link_seconds=1.5) as transport,
        pytest.raises(FederationError, match=r"has not answered for 1.5 s .*500.* last checkpoint"),
    ):
        transport.nodes()


def replies(transport: Transport, seconds: float) -> tuple[list[Reply], list[int], float]:
    pending = PendingReplies(transport, {"request": 7}, [])
    started = time.monotonic()
    found = [reply for reply in pending.replies(started + seconds) if reply is not None]
    return found, pending.unanswered, time.monotonic() - started


def test_a_whole_reply_arrives() -> None:
    content = RecordDict({"a": ConfigRecord({"x": 1, "y": "text"})})
    with serving(SuperLink(reply_with(content))) as transport:
        (reply,), unanswered, _ = replies(transport, 20.0)
    assert reply.content is not None
    assert dict(reply.content.config_records["a"]) == {"x": 1, "y": "text"}
    assert not unanswered


def test_a_frozen_upload_does_not_outlast_the_deadline() -> None:
    """Flower's own grid waits for it, for hours by default."""
    content = RecordDict({"a": ConfigRecord({"x": 1})})
    with serving(SuperLink(reply_with(content), missing=1)) as transport:
        found, unanswered, seconds = replies(transport, 1.0)
    assert (found, unanswered) == ([], [7])
    assert seconds < 10


def test_a_reply_of_thousands_of_parts_is_refused_unread() -> None:
    superlink = SuperLink(reply_with(RecordDict({str(n): ConfigRecord({"n": n}) for n in range(500)})))
    with serving(superlink) as transport:
        (reply,), _, _ = replies(transport, 20.0)
    assert reply.content is None
    assert "parts" in reply.problem
    assert "pull-object" not in superlink.calls


def test_a_reply_that_is_too_large_is_not_read_to_its_end() -> None:
    content = RecordDict({str(n): ConfigRecord({"x": b"\0" * 10**6}) for n in range(3)})
    superlink = SuperLink(reply_with(content))
    with serving(superlink) as transport:
        transport.largest_reply = 10**6
        (reply,), _, _ = replies(transport, 20.0)
    assert "more than 1000000 bytes" in reply.problem
