"""Secure sums through Flower's messages: the simulator's bits, lost sites at every stage, and what the server sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedfa.errors import AlgorithmError, FederationError
from fedfa.experiment.files import load_tensors
from fedfa.experiment.run import run
from fedfa.flower.config import RunConfig
from fedfa.flower.secure_messages import KEYS, SHARES, TRAIN, UNMASK
from fedfa.protection.secure.encoding import Layout
from fedfa.protection.secure.protocol import SecureClient
from tests.experiment.run_toys import equal_tensors
from tests.flower import small_sites
from tests.flower.loopback import QUICK, LoopbackGrid, Tamper, federate, node_configs
from tests.flower.small_sites import CLIENT, SITES, serve, small_grid
from tests.flower.test_equivalence import assert_same

MASKS: dict[str, Any] = {"privacy.masks": True}


@pytest.mark.parametrize("algorithm", ["fedfa", "scaffold", "fedadam"])
def test_a_secure_federation_has_the_simulators_bits_after_three_rounds(
    algorithm: str, tmp_path: Path, data_dir: Path
) -> None:
    config = {**MASKS, "algorithm": algorithm, "data.dir": str(data_dir)}
    flower = federate(tmp_path, config, 4)
    simulated = run(RunConfig({**QUICK, **config}).config(4), tmp_path / "simulated")
    assert_same(flower, simulated.directory)
    assert all(record["train_loss"] is None for record in simulated.metrics)
    # The config that the federation leaves gives the same bits again.
    from fedfa.experiment.config import Config

    again = run(Config.from_file(flower / "config.toml"), tmp_path / "again")
    assert equal_tensors(load_tensors(flower / "model.safetensors"), again.model)


def test_no_warning_tells_of_training_that_the_server_cannot_see(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sites do not send numbers of steps under masks, so their absence says nothing; and a loss stays at the sites."""
    serve(tmp_path / "flower", small_grid(tmp_path), algorithm="fedavg", rounds=1, privacy__masks=True)
    assert "trained nothing" not in caplog.text
    assert "training loss" not in caplog.text


def test_own_data_and_network_are_summed_securely_and_no_number_of_samples_is_announced(tmp_path: Path) -> None:
    flower = serve(tmp_path / "flower", small_grid(tmp_path), algorithm="scaffold", privacy__masks=True)
    simulated = small_sites.simulate(tmp_path / "simulated", algorithm="scaffold", privacy__masks=True)
    assert_same(flower, simulated.directory)
    announced = json.loads((flower / "federation.json").read_text())["samples"]
    assert set(announced.values()) == {1}


# -- what the server sees -----------------------------------------------------------------------------------------
def test_no_reply_holds_a_contribution_a_loss_or_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site's own vector is remembered where it is masked, and searched for in everything the server receives."""
    planted: list[bytes] = []
    masked = SecureClient.masked

    def remember(self: SecureClient, ciphertexts: Any, vector: np.ndarray) -> Any:
        planted.append(vector.tobytes())
        return masked(self, ciphertexts, vector)

    monkeypatch.setattr(SecureClient, "masked", remember)
    seen: list[Message] = []

    def watch(asked: Message, reply: Message) -> Message:
        seen.append(reply)
        return reply

    flower = serve(tmp_path / "flower", small_grid(tmp_path, watch), algorithm="fedfa", privacy__masks=True)
    assert len(planted) == 3 * SITES
    sent = b"".join(
        array.data for reply in seen for record in reply.content.array_records.values() for array in record.values()
    )
    assert len(sent) >= sum(map(len, planted))
    for vector in planted:
        parts = [vector[k : k + 32] for k in range(0, len(vector) - 32, 32)]
        assert not any(part in sent for part in parts if any(part))
    names = {key for reply in seen for record in reply.content.config_records.values() for key in record}
    assert not names & {"loss", "steps", "sample_steps", "cpu_seconds"}
    logged = b"".join(file.read_bytes() for file in flower.iterdir() if file.is_file())
    assert not any(vector[:64] in logged for vector in planted)


def test_a_site_that_requires_masks_refuses_everything_else(tmp_path: Path) -> None:
    sites = {node: {**own, "require-masks": True} for node, own in node_configs(tmp_path, SITES).items()}
    with pytest.raises(FederationError, match="secure sums only"):
        serve(tmp_path / "plain", LoopbackGrid(sites, {}, CLIENT), algorithm="fedavg")
    out = serve(tmp_path / "secure", LoopbackGrid(sites, {}, CLIENT), algorithm="fedavg", privacy__masks=True)
    assert (out / "summary.json").exists()


# -- lost sites, replays, liars -----------------------------------------------------------------------------------
def losing(kind: str, site: int, times: int = 10**9) -> Tamper:
    """A site whose replies to one kind of message do not arrive, some times."""
    left = [times]

    def lose(asked: Message, reply: Message) -> Message | None:
        record = reply.content.config_records.get("secure") if reply.has_content() else None
        from_site = record is not None and record.get("client") == site
        if asked.metadata.message_type == kind and from_site and left[0] > 0:
            left[0] -= 1
            return None
        return reply

    return lose


@pytest.mark.parametrize("kind", [KEYS, SHARES, TRAIN, UNMASK])
@pytest.mark.parametrize("times", [1, pytest.param(10**9, marks=pytest.mark.slow)], ids=["once", "always"])
def test_a_site_lost_at_any_stage_does_not_stop_the_run(kind: str, times: int, tmp_path: Path) -> None:
    grid = LoopbackGrid(node_configs(tmp_path, SITES), {}, CLIENT, losing(kind, 2, times))
    out = serve(tmp_path / "run", grid, algorithm="fedfa", rounds=2, privacy__masks=True)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2
    cohorts = [sorted(record["cohort"]) for record in records]
    assert all(set(cohort) >= {0, 1, 3} for cohort in cohorts)
    if times == 1:
        assert cohorts[1] == [0, 1, 2, 3]
        if cohorts[0] == [0, 1, 2, 3]:  # repeated, or the vector had arrived: nothing of the loss is left
            whole = serve(
                tmp_path / "whole", small_grid(tmp_path / "w"), algorithm="fedfa", rounds=2, privacy__masks=True
            )
            assert equal_tensors(*(load_tensors(one / "model.safetensors") for one in (out, whole)))


def test_a_replayed_vector_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first: dict[int, Message] = {}
    replayed: list[int] = []

    def replay(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type != TRAIN:
            return reply
        client = int(str(reply.content.config_records["secure"]["client"]))
        if client not in first:
            first[client] = reply
        elif client == 1 and not replayed:
            replayed.append(client)
            return Message(first[client].content, reply_to=asked)
        return reply

    grid = LoopbackGrid(node_configs(tmp_path, SITES), {}, CLIENT, replay)
    out = serve(tmp_path / "run", grid, algorithm="fedavg", privacy__masks=True)
    assert replayed == [1]
    assert "the vector of client 1 is of another session" in caplog.text
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [sorted(record["cohort"]) for record in records] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]]


def test_malformed_replies_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(change: Callable[[dict[str, Any]], None], kind: str) -> Tamper:
        def tamper(asked: Message, reply: Message) -> Message:
            record = reply.content.config_records.get("secure") if reply.has_content() else None
            if asked.metadata.message_type == kind and record is not None and record.get("client") == 3:
                change(record)  # type: ignore[arg-type]
            return reply

        return tamper

    for kind, change in (
        (KEYS, lambda record: record.update(mask_key=b"short")),
        (KEYS, lambda record: record.update(client=0)),
        (SHARES, lambda record: record.update(ciphertexts=[b""])),
        (TRAIN, lambda record: record.update(session=b"another")),
    ):
        caplog.clear()
        grid = LoopbackGrid(node_configs(tmp_path, SITES), {}, CLIENT, broken(change, kind))
        out = serve(tmp_path / f"{kind}{id(change)}", grid, algorithm="fedavg", rounds=1, privacy__masks=True)
        (record,) = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
        assert sorted(record["cohort"]) == [0, 1, 2]
        assert "site 3" in caplog.text


def test_two_sites_are_too_few(tmp_path: Path, data_dir: Path) -> None:
    with pytest.raises(FederationError, match="needs 3 sites or more"):
        federate(tmp_path, {**MASKS, "data.dir": str(data_dir)}, 2)


def test_the_layout_is_what_a_client_sends(tmp_path: Path) -> None:
    from fedfa.flower.checks import contribution_spec
    from fedfa.flower.secure_round import layout_of
    from tests.conftest import make_blobs
    from tests.protection.small import experiment, one_round

    made = experiment(make_blobs(), {"privacy": {"masks": True}}, "fedfa")
    _, statistics = one_round(made)
    engine = made.local_engine()
    example = made.federation.dataset.train.inputs[:2]
    spec = contribution_spec(engine._trainer, made.training.plan(made.state, made.local), example)
    assert layout_of(spec) == Layout.of(statistics.results[0].contribution)


@pytest.mark.parametrize("masks", [False, True])
def test_a_federation_with_a_budget_records_it_and_draws_noise_that_no_seed_gives(
    masks: bool, tmp_path: Path, data_dir: Path
) -> None:
    config = {"algorithm": "fedfa", "rounds": 1, "privacy.epsilon": 20.0, "privacy.masks": masks}
    ends = []
    for name in ("first", "second"):
        out = federate(tmp_path, {**config, "data.dir": str(data_dir)}, 3, folder=name)
        (record,) = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
        assert record["epsilon"] == pytest.approx(20.0, rel=2e-3)
        assert record["train_loss"] is None
        ends.append(load_tensors(out / "model.safetensors"))
    assert not equal_tensors(*ends)


# -- noise that sites add -----------------------------------------------------------------------------------------
SHARES_OF_NOISE: dict[str, Any] = {
    "algorithm": "fedfa", "rounds": 2, "privacy.epsilon": 40.0, "privacy.masks": True, "privacy.noise_by": "clients",
}  # fmt: skip


def test_shares_of_noise_have_the_simulators_bits_where_the_noise_is_simulated_too(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedfa.flower.site import SiteExperiment

    config = {**SHARES_OF_NOISE, "privacy.quantile": 0.5, "data.dir": str(data_dir)}
    real = [load_tensors(federate(tmp_path, config, 4, folder=one) / "model.safetensors") for one in ("a", "b")]
    assert not equal_tensors(*real)  # every site draws from its operating system
    monkeypatch.setattr(SiteExperiment, "simulation", True)
    flower = federate(tmp_path, config, 4)
    simulated = run(RunConfig({**QUICK, **config}).config(4), tmp_path / "simulated")
    assert_same(flower, simulated.directory)
    assert simulated.metrics[-1]["epsilon"] == pytest.approx(40.0, rel=2e-3)


def test_a_site_takes_part_only_with_as_much_noise_of_its_own_as_it_requires(tmp_path: Path, data_dir: Path) -> None:
    def run_with(name: str, **privacy: Any) -> Path:
        sites = node_configs(tmp_path / name, 3, data_dir)
        grid = LoopbackGrid({node: {**own, "require-noise": 2.0} for node, own in sites.items()}, {})
        config = {"algorithm": "fedavg", "rounds": 1, "federation.attempts": 1, "data.dir": str(data_dir)}
        config |= {f"privacy.{key}": value for key, value in privacy.items()}
        return federate(tmp_path, config, 3, folder=name, grid=grid)

    shares: dict[str, Any] = {"noise": 2.0, "masks": True, "noise_by": "clients"}
    refused: dict[str, dict[str, Any]] = {
        "plain": {}, "masks": {"masks": True}, "server": shares | {"noise_by": "server"},
        "little": shares | {"noise": 1.9},
    }  # fmt: skip
    for name, privacy in refused.items():
        with pytest.raises(FederationError):
            run_with(name, **privacy)
    assert (run_with("enough", **shares) / "summary.json").exists()


def test_a_sum_without_enough_shares_of_noise_is_never_unmasked(tmp_path: Path, data_dir: Path) -> None:
    """One of four sites is lost for good, but the noise of all four is relied on."""
    asked: list[str] = []
    lose = losing(TRAIN, 2)

    def watch(message: Message, reply: Message) -> Message | None:
        asked.append(message.metadata.message_type)
        return lose(message, reply)

    config = {**SHARES_OF_NOISE, "privacy.honest": 1.0, "federation.attempts": 2, "data.dir": str(data_dir)}
    config |= {"federation.round_seconds": 2.0}
    with pytest.raises(FederationError, match=r"3 masked vectors arrived, 4 are needed"):
        federate(tmp_path, config, 4, tamper=watch)
    assert TRAIN in asked
    assert UNMASK not in asked


def test_differential_privacy_with_the_sites_own_data_knows_how_many_sites_there_are(tmp_path: Path) -> None:
    """The budget depends on the number of sites with samples; here it is reached, and BatchNorm refused after it."""
    with pytest.raises(AlgorithmError, match="replace BatchNorm by GroupNorm"):
        serve(tmp_path / "run", small_grid(tmp_path), algorithm="fedavg", privacy__noise=2.0)
