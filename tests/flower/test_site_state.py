"""Client state survives restarts of either side; a repeated message gives the same reply."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedfa.errors import RunError
from fedfa.experiment.files import load_tensors
from fedfa.flower.messages import decode_result
from fedfa.flower.site_state import SiteState
from tests.experiment.run_toys import equal_tensors, timeless
from tests.flower.loopback import round_and_client, through_the_wire
from tests.flower.small_sites import CLIENT, serve, simulate, small_grid

RUN = "ab" * 16


def client_state(number: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"scaffold": {"w/x": torch.tensor([number])}, "model": {"n": torch.tensor(3)}}


def test_a_version_is_loaded_as_saved(tmp_path: Path) -> None:
    state = SiteState(tmp_path, RUN, 0)
    assert state.load(1) is None
    state.save(1, client_state(1.0))
    again = SiteState(tmp_path, RUN, 0).load(1)
    assert again is not None
    assert equal_tensors(again["scaffold"], client_state(1.0)["scaffold"])
    assert equal_tensors(again["model"], client_state(1.0)["model"])
    state.save(2, {})
    assert state.load(2) == {}


def test_client_state_is_readable_by_its_user_only(tmp_path: Path) -> None:
    state = SiteState(tmp_path / "state", RUN, 0)
    state.save(1, client_state(1.0))
    assert state.directory.stat().st_mode & 0o077 == 0


def test_runs_and_clients_have_separate_state(tmp_path: Path) -> None:
    SiteState(tmp_path, RUN, 0).save(1, client_state(1.0))
    assert SiteState(tmp_path, "cd" * 16, 0).load(1) is None
    assert SiteState(tmp_path, RUN, 1).load(1) is None
    SiteState(tmp_path, RUN, 10).save(1, client_state(1.0))
    SiteState(tmp_path, RUN, 1).keep_only([])
    assert SiteState(tmp_path, RUN, 10).versions() == [1]


@given(st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_only_needed_versions_are_kept(
    tmp_path_factory: pytest.TempPathFactory, there: set[int], wanted: set[int]
) -> None:
    state = SiteState(tmp_path_factory.mktemp("state"), RUN, 3)
    for version in there:
        state.save(version, {})
    state.keep_only(wanted)
    assert state.versions() == sorted(there & wanted)


def test_old_temporary_files_are_deleted_and_recent_ones_kept(tmp_path: Path) -> None:
    state = SiteState(tmp_path, RUN, 3)
    state.save(1, {})
    old, new = (state.directory / f".site3.round2.safetensors.{process}.tmp" for process in (1, 2))
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    state.keep_only([1])
    assert not old.exists()
    assert new.exists()
    assert state.versions() == [1]


@pytest.mark.parametrize("name", ["", "../../etc", "ab/cd" * 4, "AB" * 16, "x" * 32])
def test_a_server_cannot_choose_the_state_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not the key of a run"):
        SiteState(tmp_path, name, 0)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    state = SiteState(tmp_path, RUN, 0)
    state.save(1, client_state(1.0))
    (file,) = state.directory.glob("site0*")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(RunError, match="damaged"):
        state.load(1)


# -- in whole runs ----------------------------------------------------------------------------------------------------
def test_a_repeated_message_gives_the_same_reply(tmp_path: Path) -> None:
    """Flower may deliver twice, and a server that resumes asks again: the site must not have moved on."""
    grid = small_grid(tmp_path)
    replies: list[tuple[Message, Message]] = []

    def tamper(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train":
            replies.append((asked, reply))
        return reply

    grid.tamper = tamper
    serve(tmp_path / "run", grid)
    asked, first = replies[-1]
    assert asked.content.config_records["plan"]["versions"] == [1, 2]  # 1: the run may be rolled back
    context = Context(1, 5, grid.sites[asked.metadata.dst_node_id], RecordDict(), grid.run_config)
    second = CLIENT(through_the_wire(asked), context)
    for group, entry in decode_result(second.content).result.contribution.items():
        assert equal_tensors(entry.tensors, decode_result(first.content).result.contribution[group].tensors)


class Killed(BaseException):
    """The server dies."""


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("algorithm", ["scaffold", "fedfa"])
def test_a_resumed_server_ends_with_the_same_bits(algorithm: str, every: int, tmp_path: Path) -> None:
    """It dies in the fourth of five rounds, when some sites have trained already and are a version ahead.

    With a checkpoint every second round it goes on from the second, and its sites must go back with it.
    """
    settings = f"local.epochs=1 local.lr=0.1 local.batch_size=16 device=cpu checkpoint.every={every}"
    grid = small_grid(tmp_path)

    def dying(asked: Message, reply: Message) -> Message:
        if round_and_client(asked) == (3, 2):
            raise Killed
        return reply

    grid.tamper = dying
    config: dict[str, Any] = {"rounds": 5, "settings": settings, "algorithm": algorithm, "cohort__clients": 3}
    with pytest.raises(Killed):
        serve(tmp_path / "run", grid, **config)
    assert not (tmp_path / "run" / "summary.json").exists()
    grid.tamper = None
    flower = serve(tmp_path / "run", grid, **config)
    uninterrupted = serve(tmp_path / "uninterrupted", small_grid(tmp_path), **config)
    simulated = simulate(tmp_path / "simulated", **config).directory
    for name in ("model.safetensors", "server.safetensors"):
        assert equal_tensors(load_tensors(flower / name), load_tensors(uninterrupted / name))
        assert equal_tensors(load_tensors(flower / name), load_tensors(simulated / name))
    assert [r["accuracy"] for r in timeless(flower)] == [r["accuracy"] for r in timeless(simulated)]


def test_a_site_that_lost_its_state_starts_empty_or_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def losing(asked: Message, reply: Message) -> Message:
        if round_and_client(asked) == (1, 2):
            for file in (tmp_path / "state").rglob("site2.*"):
                file.unlink()
        return reply

    flower = serve(tmp_path / "renew", small_grid(tmp_path, losing))
    assert "(node" in caplog.text
    assert "lost its client state and started with empty state" in caplog.text
    assert 2 in timeless(flower)[2]["cohort"]
    flower = serve(tmp_path / "refuse", small_grid(tmp_path, losing), federation__lost_state="refuse")
    assert 2 not in timeless(flower)[2]["cohort"]
    assert "restore it, or set federation.lost_state" in caplog.text


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    serve(tmp_path / "run", small_grid(tmp_path), rounds=2)
    longer = serve(tmp_path / "run", small_grid(tmp_path), rounds=4)
    simulated = simulate(tmp_path / "simulated", rounds=4).directory
    assert equal_tensors(load_tensors(longer / "server.safetensors"), load_tensors(simulated / "server.safetensors"))


def test_disks_do_not_fill_up(tmp_path: Path) -> None:
    serve(tmp_path / "run", small_grid(tmp_path), rounds=6)
    (folder,) = (tmp_path / "state").iterdir()
    assert SiteState(tmp_path / "state", folder.name, 1).versions() == [3, 4, 5, 6]  # three checkpoints, and the last
    assert not list(folder.glob(".*"))


def test_a_damaged_state_counts_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit used to keep the site out for ever."""

    def damaging(asked: Message, reply: Message) -> Message:
        if round_and_client(asked) == (0, 2):
            (file,) = (tmp_path / "state").rglob("site2.round1.safetensors")
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        return reply

    with caplog.at_level("WARNING", "fedfa"):
        flower = serve(tmp_path / "run", small_grid(tmp_path, damaging))
    assert "lost its client state and started with empty state" in caplog.text
    assert all(2 in record["cohort"] for record in timeless(flower))
