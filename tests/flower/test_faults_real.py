"""Faults, each done to real processes of one federation: sites and servers killed, sites that misbehave.

The tests share the federation and leave it whole: three sites, registered and connected.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfa.experiment.files import load_tensors
from fedfa.experiment.run import run
from fedfa.flower.operate.federation import LocalFederation, Value
from fedfa.flower.operate.new_app import write_app
from tests.flower import real

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

SITES = 3
LONG: dict[str, Any] = {"epochs": 60}
"""So that a round lasts a while."""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, data_dir: Path, states: Path) -> Iterator[LocalFederation]:
    with LocalFederation(tmp_path_factory.mktemp("federation")) as started:
        real.start(started, SITES, data_dir, states)
        yield started


def test_a_round_completes_by_quorum_after_a_site_is_killed_which_rejoins_with_its_state(
    federation: LocalFederation, states: Path, data_dir: Path, tmp_path: Path
) -> None:
    """SCAFFOLD's control variates live on the site's disk; after the kill only that disk is left of the site.

    All in one run: the rounds go on without the site, and with it once it is back.
    """
    out = tmp_path / "run"
    rules: dict[str, Value] = {"quorum": 0.6, "grace_seconds": 5.0, "round_seconds": 400.0}
    settings = real.quick_settings("scaffold", 20, SITES, **LONG)
    started = real.submit(federation, settings, out, data_dir, None, **rules)
    victim = federation.processes.running["site2"]
    real.until(lambda: "ROUND 2]" in victim.output(), "round 2 at site 2", started)
    victim.kill()
    assert not victim.pids()
    real.until(lambda: len(real.metrics(out)) >= 2, "round 2 without site 2", started)
    first, second = real.metrics(out)[:2]
    assert sorted(first["cohort"]) == [0, 1, 2]
    assert second["federation"]["absent"] == [2]
    assert sorted(second["cohort"]) == [0, 1]
    (key,) = [path for path in states.iterdir() if list(path.glob("site2.*"))]
    before = load_tensors(key / "site2.round1.safetensors")

    config = real.site_config(2, SITES, data_dir, states)
    real.until(lambda: restarted(federation, 2, config), "site 2 to be admitted again", started)
    real.until(lambda: 2 in real.metrics(out)[-1]["cohort"], "a round with site 2", started)
    real.finish(started, out)
    back = next(record["round"] for record in real.metrics(out)[1:] if 2 in record["cohort"])
    assert all(2 in record["cohort"] for record in real.metrics(out)[back - 1 :])
    assert "lost its client state" not in started.output()
    after = load_tensors(key / "site2.round20.safetensors")
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_run_resumed_after_kills_of_serverapp_and_superlink_ends_with_the_same_bits(
    federation: LocalFederation, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    settings, out = real.quick_settings("scaffold", 4, SITES, **LONG), tmp_path / "run"
    once = real.submit(federation, settings, out, data_dir)
    real.until(lambda: len(real.metrics(out)) >= 1, "round 1", once)
    (server,) = [process for process in federation.superlink.pids() if "flwr-serverapp" in command_of(process)]
    os.kill(server, signal.SIGKILL)
    federation.flwr("stop", run_id(once.output()), "here")  # else it counts as running until its heartbeat is missed
    assert once.wait(real.LIMIT) is not None
    assert not (out / "summary.json").exists()
    done = len(real.metrics(out))
    assert done < 4

    twice = real.submit(federation, settings, out, data_dir)
    real.until(lambda: len(real.metrics(out)) > done, "another round", twice)
    federation.superlink.kill()
    assert twice.wait(real.LIMIT) is not None
    assert not (out / "summary.json").exists()
    federation.start_superlink()
    last = real.submit(federation, settings, out, data_dir)
    real.finish(last, out)

    here = run(settings, tmp_path / "simulator")
    assert [record["round"] for record in real.metrics(out)] == [1, 2, 3, 4]
    assert [record["accuracy"] for record in real.metrics(out)] == [record["accuracy"] for record in here.metrics]
    real.assert_same_tensors(out / "model.safetensors", here.directory / "model.safetensors")
    real.assert_same_tensors(out / "server.safetensors", here.directory / "server.safetensors")


MISBEHAVING = '''
"""Site 2 sends another kind of invalid update in each round."""

from fedfa.flower import make_client_app, make_server_app


def misbehave(message, context, call_next):
    import torch
    from fedfa.flower.messages import pack, unpack

    reply = call_next(message, context)
    if context.node_config["partition-id"] != 2 or message.metadata.message_type != "train":
        return reply
    contribution, result = unpack(reply.content["contribution"]), reply.content["result"]
    name = next(name for name in contribution if name.startswith("fedavg/") and name.endswith("weight") and ":" in name)
    value = contribution[name]
    wrong = [value * torch.nan, value[:-1], value + 1e20, value][result["round"]]
    contribution[name] = wrong
    reply.content["contribution"] = pack(contribution)
    if result["round"] == 3:
        result["round"] = 1
    return reply


client = make_client_app(mods=[misbehave])
server = make_server_app()
'''


def test_invalid_updates_of_a_site_are_rejected_and_the_rounds_continue(
    federation: LocalFederation, data_dir: Path, tmp_path: Path
) -> None:
    app, out = tmp_path / "app", tmp_path / "run"
    write_app(app)
    (app / "site_app.py").write_text(MISBEHAVING)
    settings = real.quick_settings("fedfa", 4, SITES)
    started = real.submit(federation, settings, out, data_dir, app, evaluation="server")
    summary = real.finish(started, out)
    records, log = real.metrics(out), started.output()
    assert [record["federation"]["rejected"] for record in records] == [[2]] * 4
    assert all(sorted(record["cohort"]) == [0, 1] for record in records)
    for number, reason in enumerate(["not finite", "has shape", "norm", "belongs to round 2"], start=1):
        (line,) = [line for line in log.splitlines() if f"round {number}: update of node" in line]
        assert "(site 2) rejected" in line
        assert reason in line
    assert summary["final_accuracy"] > 0.2
    assert all(bool(torch.isfinite(value).all()) for value in load_tensors(out / "model.safetensors").values())


def restarted(federation: LocalFederation, site: int, config: dict[str, Value]) -> bool:
    """Start a site like a service manager, which retries while the SuperLink still lists the dead node."""
    if federation.processes.running[f"site{site}"].exit_code is not None:
        federation.start_site(site, config)
    return federation.joined(site)


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:  # ended meanwhile
        return ""


def run_id(log: str) -> str:
    return log.split("Successfully started run ")[1].split()[0]
