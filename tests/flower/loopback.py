"""Sites in this process, behind Flower's own interfaces: real apps, real messages through Flower's serialisation."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedfa.flower.client_app import make_client_app
from fedfa.flower.server_app import make_server_app

Tamper = Callable[[Message, Message], Message | None]
"""Given a request and its reply, returns the reply that arrives instead, or None for no reply."""


QUICK: dict[str, Any] = {
    "preset": "digits-c2",
    "rounds": 3,
    "settings": "local.epochs=1 local.batch_size=32 data.offline=true",
    "federation.wait_seconds": 5.0,
    "federation.poll_seconds": 0.001,
}


def enter_run(node: int = 1) -> None:
    """Set Flower's run identity, without which messages cannot be made."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1


def through_the_wire(message: Message) -> Message:
    """Serialise and deserialise the message with Flower's own code."""
    with no_object_id_recompute():
        number = message.object_id
        objects = {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(number, objects)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = number
    return arrived


def round_and_client(asked: Message) -> tuple[int, int] | None:
    """Round and client of a training request, both counted from 0; None for other messages."""
    if asked.metadata.message_type != "train":
        return None
    plan: dict[str, Any] = dict(asked.content.config_records["plan"])
    return plan["round"], plan["client"]


def content_through_the_wire(content: RecordDict) -> RecordDict:
    """Content of a message after serialisation."""
    enter_run()
    return through_the_wire(Message(content, dst_node_id=1, message_type="train")).content


class LoopbackGrid(Grid):
    """A grid whose nodes are client apps in this process.

    Args:
        sites: Node config by node id.
        run_config: The run's configuration.
        app: The sites' app; left out, a new one for each message, as in Flower's processes.
        tamper: See :data:`Tamper`.
    """

    def __init__(
        self,
        sites: Mapping[int, dict[str, Any]],
        run_config: dict[str, Any],
        app: ClientApp | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        enter_run()
        self.app = app
        self.tamper = tamper
        self.run_config = run_config
        self.sites = dict(sites)
        self.states: dict[int, RecordDict] = {}
        """What each SuperNode keeps for its app between messages."""
        self.messages: list[Message] = []
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.sites)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            self.messages.append(message)
            number = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            node = message.metadata.dst_node_id
            if node not in self.sites:
                continue
            state = self.states.setdefault(node, RecordDict())
            context = Context(1, node, self.sites[node], state, self.run_config)
            arrived = through_the_wire(message)
            arrived.metadata.__dict__["_message_id"] = number
            app = self.app if self.app is not None else make_client_app()
            reply: Message | None = app(arrived, context)
            assert reply is not None
            if self.tamper is not None:
                reply = self.tamper(arrived, reply)
            if reply is not None:
                self._replies[number] = through_the_wire(reply)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


def federate(
    tmp_path: Path,
    config: dict[str, Any],
    sites: int = 3,
    *,
    app: ClientApp | None = None,
    server: ServerApp | None = None,
    tamper: Tamper | None = None,
    data_dir: Path | None = None,
    folder: str = "flower",
    grid: LoopbackGrid | None = None,
) -> Path:
    """Execute a run through real apps; return its run directory."""
    out = tmp_path / folder
    config = {**QUICK, "federation.run_folder": str(out), **config}
    grid = grid or LoopbackGrid(node_configs(tmp_path, sites, data_dir), config, app, tamper)
    grid.run_config = config
    context = Context(1, 0, {}, RecordDict(), config)
    (server if server is not None else make_server_app())(grid, context)
    return out


def node_configs(tmp_path: Path, sites: int, data_dir: Path | None = None) -> dict[int, dict[str, Any]]:
    """Node configs by arbitrary node id."""
    own: dict[str, Any] = {"num-partitions": sites, "state-dir": str(tmp_path / "state")}
    if data_dir is not None:
        own["data-dir"] = str(data_dir)
    return {7919 * (sites - site) % 997 + 10: {"partition-id": site, **own} for site in range(sites)}
