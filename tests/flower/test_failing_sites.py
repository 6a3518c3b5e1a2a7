"""Rounds with missing sites: quorum, substitutes, retries, and the errors when nothing helps."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedfa.errors import ConfigError, FederationError, RunError
from fedfa.experiment.files import load_tensors
from fedfa.flower.messages import decode_announcement
from fedfa.flower.transport import Transport
from tests.experiment.run_toys import equal_tensors, timeless
from tests.flower.loopback import LoopbackGrid, round_and_client
from tests.flower.small_sites import SITES, serve, simulate, small_grid


def node_of(grid: LoopbackGrid, site: int) -> int:
    return next(node for node, config in grid.sites.items() if config["partition-id"] == site)


def when(round: int, act: Callable[[LoopbackGrid], None], grid: LoopbackGrid, site: int = 0) -> None:
    """Do something once, as soon as this site has answered in this round (counted from 0)."""
    done: list[bool] = []

    def tamper(asked: Message, reply: Message) -> Message:
        if round_and_client(asked) == (round, site) and not done:
            done.append(True)
            act(grid)
        return reply

    grid.tamper = tamper


def test_a_run_starts_with_a_quorum_and_a_late_site_joins(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    late = node_of(grid, 3)
    config = grid.sites.pop(late)
    when(0, lambda grid: grid.sites.update({late: config}), grid)
    flower = serve(tmp_path / "run", grid, federation__quorum=0.75, rounds=4)
    cohorts = [set(record["cohort"]) for record in timeless(flower)]
    assert cohorts[0] == {0, 1, 2}
    assert cohorts[-1] == {0, 1, 2, 3}


def test_an_unreachable_superlink_is_not_retried_forever() -> None:
    """Flower's own connection, to a closed port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    grid = HttpGrid(f"127.0.0.1:{port}", insecure=True, token="any")
    grid.set_run(Run.create_empty(1))
    with contextlib.closing(grid), pytest.raises(FederationError, match=r"has not answered for 2 s .* last checkpoint"):
        Transport(grid, link_seconds=2.0).nodes()


def test_a_cohort_does_not_depend_on_the_connected_sites(tmp_path: Path) -> None:
    """The cohort follows from seed and round; missing sites are only left out."""
    whole = serve(tmp_path / "whole", small_grid(tmp_path), cohort__clients=2, rounds=6)
    grid = small_grid(tmp_path)
    del grid.sites[node_of(grid, 1)]
    partial = serve(tmp_path / "partial", grid, cohort__clients=2, rounds=6)
    drawn = [record["cohort"] for record in timeless(whole)]
    assert {tuple(cohort) for cohort in drawn} != {tuple(drawn[0])}
    assert any(1 in cohort for cohort in drawn)
    for record, cohort in zip(timeless(partial), drawn, strict=True):
        assert record["cohort"] == [client for client in cohort if client != 1]


def test_too_few_sites_at_the_start_are_an_error(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    for site in (1, 2, 3):
        del grid.sites[node_of(grid, site)]
    started = time.monotonic()
    with pytest.raises(FederationError, match=r"1 sites announced themselves within .*4 are expected"):
        serve(tmp_path / "run", grid)
    with pytest.raises(FederationError, match="0 sites"):
        serve(tmp_path / "run", LoopbackGrid({}, {}))
    assert time.monotonic() - started < 30


def test_a_round_without_quorum_is_retried_and_a_site_that_returns_takes_part(tmp_path: Path) -> None:
    """The result is that of a run without missing sites: the plan and the order of addition are the same."""
    grid = small_grid(tmp_path)
    node = node_of(grid, 2)
    calls: list[int] = []

    def tamper(asked: Message, reply: Message) -> Message | None:
        if round_and_client(asked) == (1, 2):
            calls.append(1)
            return None if len(calls) == 1 else reply
        return reply

    grid.tamper = tamper
    flower = serve(tmp_path / "run", grid, federation__quorum=1.0)
    assert len(calls) == 2
    assert node in grid.sites
    simulated = simulate(tmp_path / "simulated").directory
    assert equal_tensors(load_tensors(flower / "server.safetensors"), load_tensors(simulated / "server.safetensors"))
    assert [record["cohort"] for record in timeless(flower)] == [r["cohort"] for r in timeless(simulated)]


def test_a_round_that_never_reaches_its_quorum_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    gone: dict[int, dict[str, Any]] = {}

    def tamper(asked: Message, reply: Message) -> Message | None:
        if round_and_client(asked) in [(1, 1), (1, 2), (1, 3)]:
            gone[asked.metadata.dst_node_id] = grid.sites.pop(asked.metadata.dst_node_id)
            return None
        return reply

    grid.tamper = tamper
    with pytest.raises(FederationError, match=r"round 2: 1 of 4 sites .* 2 are needed .*site 1: not connected"):
        serve(tmp_path / "run", grid, federation__attempts=2)
    assert len(timeless(tmp_path / "run")) == 1
    grid.sites |= gone
    grid.tamper = None
    flower = serve(tmp_path / "run", grid)
    simulated = simulate(tmp_path / "simulated").directory
    assert equal_tensors(load_tensors(flower / "server.safetensors"), load_tensors(simulated / "server.safetensors"))


def test_a_substitute_replaces_a_site_that_fails_or_is_not_connected(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    del grid.sites[node_of(grid, 1)]

    def tamper(asked: Message, reply: Message) -> Message:
        if (now := round_and_client(asked)) is not None and now[1] == 2:
            reply.content.clear()
        return reply

    grid.tamper = tamper
    flower = serve(
        tmp_path / "run", grid, cohort__clients=2, rounds=6, federation__replace=True, federation__quorum=0.5
    )
    records = timeless(flower)
    assert all(set(record["cohort"]) == {0, 3} for record in records)  # the only two that are of use
    replaced = [record["federation"].get("replaced", {}) for record in records]
    assert any("1" in one for one in replaced)
    assert any("2" in one for one in replaced)
    again = serve(tmp_path / "again", grid, cohort__clients=2, rounds=6, federation__replace=True)
    assert [record["federation"].get("replaced", {}) for record in timeless(again)] == replaced


def test_a_round_ends_after_the_grace_period(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)

    def tamper(asked: Message, reply: Message) -> Message | None:
        return None if round_and_client(asked) == (0, 1) else reply

    grid.tamper = tamper
    started = time.monotonic()
    flower = serve(tmp_path / "run", grid, rounds=1, federation__round_seconds=600.0, federation__grace_seconds=0.05)
    assert time.monotonic() - started < 100
    assert set(timeless(flower)[0]["cohort"]) == {0, 2, 3}


def test_a_restarted_site_with_a_new_node_id_replaces_the_unresponsive_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without node keys a SuperNode that restarts gets a new id, and the old one stays listed for a while."""
    grid = small_grid(tmp_path)
    old = node_of(grid, 2)
    when(0, lambda grid: grid.sites.update({4242: dict(grid.sites[old])}), grid)
    restarted = grid.tamper
    assert restarted is not None

    def tamper(asked: Message, reply: Message) -> Message | None:
        gone = 4242 in grid.sites and asked.metadata.dst_node_id == old
        return None if gone else restarted(asked, reply)

    grid.tamper = tamper
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, rounds=5)
    assert f"nodes {old} and 4242 both claim site 2" in caplog.text
    assert f"node 4242 replaces node {old} as site 2" in caplog.text
    assert 2 in timeless(flower)[-1]["cohort"]
    assert grid.messages[-1].metadata.group_id == "5"


def change_announcement(**change: Any) -> Callable[[Message, Message], Message]:
    def tamper(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "query.site" and decode_announcement(reply.content).site == 3:
            reply.content.config_records["site"].update(change)
        return reply

    return tamper


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": "0.0.1"}, "it has fedfa 0.0.1, the server"),
        ({"site": 7}, "it claims to be site 7 of 4"),
        ({"site": -1}, "it claims to be site -1"),
        ({"samples": 2**60}, "it announces"),
        ({"samples": -1}, "it announces"),
        ({"input_shape": [5]}, r"inputs of shape \[5\], others have"),
        ({"input_shape": [-5]}, "not a shape"),
    ],
)
def test_a_site_with_an_invalid_announcement_is_refused(
    change: dict[str, Any], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = small_grid(tmp_path, change_announcement(**change))
    nodes = sorted(grid.sites, key=lambda node: grid.sites[node]["partition-id"])
    grid.sites = {node: grid.sites[node] for node in nodes}  # the others are heard first
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, rounds=1)
    assert re.search(f"node {nodes[3]} is refused: .*{problem}", caplog.text)
    assert set(timeless(flower)[0]["cohort"]) == {0, 1, 2}


def test_a_late_site_with_an_invalid_number_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else it could be drawn as a substitute, and nothing is known of a client with that number."""
    grid = small_grid(tmp_path)
    del grid.sites[node_of(grid, 1)]
    config = dict(grid.sites[node_of(grid, 0)])
    when(0, lambda grid: grid.sites.update({4242: config}), grid)
    joining = grid.tamper
    assert joining is not None

    def tamper(asked: Message, reply: Message) -> Message | None:
        if asked.metadata.dst_node_id == 4242 and asked.metadata.message_type == "query.site":
            reply.content.config_records["site"].update({"site": 7, "sites": 8})
        return joining(asked, reply)

    grid.tamper = tamper
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, federation__sites=SITES, federation__replace=True)
    assert "node 4242 is refused: it claims to be site 7, but there are 4" in caplog.text
    assert all(set(record["cohort"]) == {0, 2, 3} for record in timeless(flower))


def silent_at_evaluation(*sites: int) -> Callable[[Message, Message], Message | None]:
    def tamper(asked: Message, reply: Message) -> Message | None:
        if asked.metadata.message_type != "evaluate":
            return reply
        return None if asked.content.config_records["plan"]["client"] in sites else reply

    return tamper


def test_an_evaluation_ends_after_the_grace_period(tmp_path: Path) -> None:
    grid = small_grid(tmp_path, silent_at_evaluation(1))
    rules = {"federation__evaluation": "sites", "federation__round_seconds": 600.0, "federation__grace_seconds": 0.05}
    started = time.monotonic()
    flower = serve(tmp_path / "run", grid, rounds=1, **rules)
    assert time.monotonic() - started < 100
    assert timeless(flower)[0]["accuracy"] is not None


def test_a_server_with_test_data_continues_when_no_site_evaluates(tmp_path: Path) -> None:
    grid = small_grid(tmp_path, silent_at_evaluation(*range(SITES)))
    flower = serve(tmp_path / "run", grid, rounds=2, federation__evaluation="both")
    for record in timeless(flower):
        assert record["accuracy"] is not None
        assert "sites_accuracy" not in record["federation"]
    with pytest.raises(FederationError, match="no site could evaluate the model"):
        serve(tmp_path / "sites", grid, rounds=2, federation__evaluation="sites")


def test_sites_of_which_no_majority_agrees_on_their_number_are_an_error(tmp_path: Path) -> None:
    grid = small_grid(tmp_path)
    for site in (0, 1):
        grid.sites[node_of(grid, site)]["num-partitions"] = SITES + 1
    with pytest.raises(FederationError, match=r"as many as num-partitions .* with the same N"):
        serve(tmp_path / "run", grid)


def test_a_site_with_another_network_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The plan contains fingerprints of network, data and methods; a site with others does not train."""

    def tamper(asked: Message, reply: Message) -> Message:
        return reply

    grid = small_grid(tmp_path, tamper)
    push = grid.push_messages

    def falsifying(messages: list[Message]) -> Any:
        for message in messages:
            if "plan" in message.content.config_records and message.metadata.dst_node_id == node_of(grid, 1):
                message.content.config_records["plan"]["origin/network"] = "0" * 32
        return push(messages)

    grid.push_messages = falsifying  # type: ignore[method-assign, assignment]  # a dishonest network
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, rounds=1)
    assert "(site 1): the network here is not the server's" in caplog.text
    assert set(timeless(flower)[0]["cohort"]) == {0, 2, 3}


@pytest.mark.parametrize(
    ("config", "error", "problem"),
    [
        ({"federation__quorun": 0.5}, ConfigError, r"unknown key federation.quorun \(did you mean 'quorum'\?\)"),
        ({"federation__quorum": 2.0}, ConfigError, "federation.quorum = 2.0"),
        ({"algorithm": "centralised"}, ConfigError, "pools the data of all clients"),
        ({"data__clients": 9}, ConfigError, "data.clients = 9, but the federation has 4 sites"),
        ({"federation__resume": False}, RunError, "holds a run already"),
    ],
)
def test_an_invalid_run_config_is_an_error_of_one_line(
    config: dict[str, Any], error: type[Exception], problem: str, tmp_path: Path
) -> None:
    if error is RunError:
        serve(tmp_path / "run", small_grid(tmp_path), rounds=1)
    with pytest.raises(error, match=problem):
        serve(tmp_path / "run", small_grid(tmp_path), **config)
