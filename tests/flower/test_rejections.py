"""An invalid update is rejected with a log line that names the node, leaves no trace, and the round continues."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message

from fedfa.engines.engine import Engine
from fedfa.errors import FederationError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import load_tensors
from fedfa.flower.messages import PACKED, pack, unpack
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.tensors import ComponentTensors, Tensors
from tests.experiment.run_toys import equal_tensors, timeless
from tests.flower.loopback import LoopbackGrid, Tamper, round_and_client
from tests.flower.small_sites import serve, simulate, small_grid

WEIGHT = "scaffold/model:out.weight"
BAD_SITE, BAD_ROUND = 2, 1


def spoiling(change: Callable[[Message], None], site: int = BAD_SITE, round: int = BAD_ROUND) -> Tamper:
    """Spoil the reply of one site in one round (both counted from 0)."""

    def tamper(asked: Message, reply: Message) -> Message:
        if round_and_client(asked) == (round, site):
            change(reply)
        return reply

    return tamper


def contribution(change: Callable[[Tensors], object]) -> Callable[[Message], None]:
    """Change the tensors of the contribution."""

    def spoil(reply: Message) -> None:
        tensors = unpack(reply.content.array_records["contribution"])
        change(tensors)
        reply.content["contribution"] = pack(tensors)

    return spoil


def array(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], None]:
    return contribution(lambda tensors: tensors.update({name: change(tensors[name])}))


def value(name: str, to: object) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        reply.content.config_records["result"][name] = to  # type: ignore[assignment]  # wrong on purpose

    return spoil


def drop(name: str) -> Callable[[Message], None]:
    return contribution(lambda tensors: tensors.pop(name))


def weightless_but_huge(reply: Message) -> None:
    array("scaffold/model#weight", torch.zeros_like)(reply)
    array(WEIGHT, lambda t: t + 1e4)(reply)


def one(bad: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = bad
        return tensor

    return spoil


BAD = {
    "NaN": (array(WEIGHT, one(math.nan)), "not finite"),
    "infinity": (array(WEIGHT, one(-math.inf)), "not finite"),
    "shape": (array(WEIGHT, lambda t: t[:, 1:]), r"has shape \[4, 7\], not \[4, 8\]"),
    "transposed": (array(WEIGHT, lambda t: t.T), r"has shape \[8, 4\]"),
    "dtype": (array(WEIGHT, torch.Tensor.double), "is torch.float64, not torch.float32"),
    "counter as float32": (array("scaffold/model:norm.num_batches_tracked", torch.Tensor.float), "not torch.float64"),
    "missing tensor": (drop(WEIGHT), "lacks out.weight"),
    "extra tensor": (contribution(lambda t: t.update({"scaffold/model:x": torch.zeros(1)})), "unknown tensor 'x'"),
    "extra group": (contribution(lambda t: t.update({"x/y#weight": torch.zeros(())})), "unknown groups x/y"),
    "weightless": (drop("scaffold/model#weight"), "has no weight"),
    "negative weight": (array("scaffold/model#weight", lambda w: -w), "negative"),
    "huge weight": (array("scaffold/model#weight", lambda w: w * 1e6), "more than its"),
    "weight of another shape": (array("scaffold/model#weight", lambda w: w.expand(4, 1)), "the weight of"),
    "huge norm": (array(WEIGHT, lambda t: t + 1e6), "federation.norm_limit"),
    "huge norm without weight": (weightless_but_huge, "has sums without weight"),
    "old round": (value("round", 0), "it belongs to round 1, not 2"),
    "other run": (value("run", "00" * 16), "another run"),
    "other client": (value("client", 0), "is from client 0, but the plan went to"),
    "more samples than announced": (value("sample_steps", 10**6), "a client with 60 samples makes"),
    "fewer steps": (value("steps", 1), "makes 4 over 60"),
    "not a number": (value("steps", "many"), "not of type int"),
    "not packed": (
        lambda reply: reply.content.__setitem__(
            "contribution", ArrayRecord({PACKED: Array("uint8", (1,), PACKED, b"?")})
        ),
        "the manifest of the tensors is not valid",
    ),
    "thousands of records": (
        lambda reply: reply.content.update({f"more{number}": ConfigRecord() for number in range(5000)}),
        "the reply has 5002 records, not 2",
    ),
    "a forged line": (value("run", "x\nround 2: all is well\x1b[2J" + "y" * 10**6), "another run.*characters"),
    "empty": (lambda reply: reply.content.clear(), "no record 'result'"),
}


class _Losing:
    """The simulator's engine, without one client's update in one round."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.evaluate, self.evaluate_each = engine.evaluate, engine.evaluate_each
        self.remarks, self.close = engine.remarks, engine.close

    def train(
        self, plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        lost = {BAD_SITE} if plan.round == BAD_ROUND else set()
        yield from self.engine.train(plan, [client for client in clients if client not in lost], client_state)


class LosingExperiment(Experiment):
    def engine(self) -> Engine:
        return _Losing(super().engine())


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulator's run in which site 2 has no part in round 2."""
    return simulate(tmp_path_factory.mktemp("reference") / "run", LosingExperiment).directory


@pytest.mark.parametrize("case", BAD)
def test_a_bad_update_is_rejected_and_leaves_no_trace(
    case: str, tmp_path: Path, without_it: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SCAFFOLD keeps state on sites and server: had either kept anything of the bad round, later rounds would differ.

    The reference is the simulator without that client in that round: the weights of the others are renormalised.
    """
    change, problem = BAD[case]
    grid = small_grid(tmp_path, spoiling(change))
    node = next(node for node, config in grid.sites.items() if config["partition-id"] == BAD_SITE)
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid)
    (line,) = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert line.startswith(f"round 2: update of node {node} (site {BAD_SITE}) rejected: ")
    assert re.search(problem, line)
    records = timeless(flower)
    assert [record["federation"].get("rejected") for record in records] == [None, [BAD_SITE], None]
    assert records[1]["federation"]["absent"] == [BAD_SITE]
    assert BAD_SITE not in records[1]["cohort"]
    assert equal_tensors(load_tensors(flower / "server.safetensors"), load_tensors(without_it / "server.safetensors"))
    for record, expected in zip(records, timeless(without_it), strict=True):
        del record["federation"], record["bytes_down"], expected["bytes_down"]  # it was sent to the bad site too
        assert record == expected


def test_a_configured_norm_limit_is_enforced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits: dict[str, Any] = {"federation__norm_limit": 1e-9, "federation__attempts": 1}
    with (
        caplog.at_level(logging.WARNING, "fedfa"),
        pytest.raises(FederationError, match=r"1e-09 \(federation.norm"),
    ):
        serve(tmp_path / "run", small_grid(tmp_path), **limits)


def test_a_site_that_fails_reports_why_and_the_round_continues(
    tmp_path: Path, without_it: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tamper(asked: Message, reply: Message) -> Message:
        fails = round_and_client(asked) == (BAD_ROUND, BAD_SITE)
        return Message(Error(1001, "the disk is full"), reply_to=asked) if fails else reply

    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", small_grid(tmp_path, tamper))
    assert "(site 2): the disk is full" in caplog.text
    assert equal_tensors(load_tensors(flower / "server.safetensors"), load_tensors(without_it / "server.safetensors"))


def test_a_round_does_not_wait_for_an_unresponsive_site_beyond_its_deadline(tmp_path: Path, without_it: Path) -> None:
    def tamper(asked: Message, reply: Message) -> Message | None:
        return None if round_and_client(asked) == (BAD_ROUND, BAD_SITE) else reply

    flower = serve(tmp_path / "run", small_grid(tmp_path, tamper))
    assert timeless(flower)[1]["federation"]["absent"] == [BAD_SITE]
    assert equal_tensors(load_tensors(flower / "server.safetensors"), load_tensors(without_it / "server.safetensors"))


class _StrictGrid(LoopbackGrid):
    """Like Flower's own grid: a reply that cannot be decoded fails the call and loses the other replies."""

    unreadable = -1

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        came = []
        for number in message_ids:
            for message in super().pull_messages([number]):
                if message.metadata.src_node_id == self.unreadable and message.metadata.message_type == "train":
                    raise ValueError("not a record")
                came.append(message)
        return came


def test_a_reply_that_flower_cannot_read_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = small_grid(tmp_path)
    grid = _StrictGrid(plain.sites, {}, plain.app)
    grid.unreadable = next(node for node, config in grid.sites.items() if config["partition-id"] == BAD_SITE)
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, federation__quorum=0.75)
    assert [sorted(record["cohort"]) for record in timeless(flower)] == [[0, 1, 3]] * 3
    assert (
        f"node {grid.unreadable} (site {BAD_SITE}): its reply cannot be read (ValueError: not a record)" in caplog.text
    )
