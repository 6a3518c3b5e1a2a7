"""A run directory changed by a disk, a transfer or a hand is refused in words, or continues to the same bits."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.errors import FedfaError, RunError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import append_line, read_lines, write_atomically
from fedfa.experiment.record import RoundRecord
from fedfa.experiment.run import run
from fedfa.experiment.run_directory import RunDirectory
from tests.experiment.run_toys import forget_digests, small, timeless

CONFIG = small("scaffold+ccvr", rounds=3, evaluation={"every": 2}, diagnostics={"every": 1})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, blobs: DataSet) -> dict[str, Path]:
    """A run that was stopped after two rounds, and the same run finished."""
    folder = tmp_path_factory.mktemp("runs")
    finished = run(CONFIG, folder / "finished", data=blobs).directory

    def stop(_: Experiment, record: RoundRecord) -> None:
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, folder / "stopped", data=blobs, callbacks=[stop])
    return {"finished": finished, "stopped": folder / "stopped"}


Change = Callable[[bytes], bytes]


def changes(draw: random.Random) -> Change:
    """A random change of a file's content."""

    def apply(content: bytes) -> bytes:
        data = bytearray(content)
        place = draw.randrange(len(data)) if data else 0
        kind = draw.choice(["bit", "byte", "cut", "drop", "repeat", "zeros", "digit"])
        if kind == "bit" and data:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == "byte" and data:
            data[place] = draw.randrange(256)
        elif kind == "cut":
            del data[place:]
        elif kind == "drop":
            del data[place : place + draw.randrange(1, 40)]
        elif kind == "repeat":
            data[place:place] = data[place : place + draw.randrange(1, 40)]
        elif kind == "zeros":
            data[place : place + 20] = bytes(len(data[place : place + 20]))
        elif digits := [at for at, one in enumerate(data) if chr(one).isdigit()]:
            data[draw.choice(digits)] = ord(draw.choice("0123456789"))
        return bytes(data)

    return apply


def same_result(one: Path, other: Path) -> bool:
    """Models, records and client state are equal, times apart."""
    tensors = [load(one / name) == load(other / name) for name in ("model.safetensors", "server.safetensors")]
    return all(tensors) and timeless(one) == timeless(other)


def load(path: Path) -> dict[str, bytes]:
    from fedfa.experiment.files import load_tensors

    return {name: value.contiguous().numpy().tobytes() for name, value in load_tensors(path).items()}


def mutate(seed: int, runs: dict[str, Path], folder: Path, blobs: DataSet, only: str | None = None) -> str:
    """Change one file of a copy of a run, resume it, and return what came of it; anything silent or raw fails."""
    draw = random.Random(seed)
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(runs[draw.choice(sorted(runs))], copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.name != ".lock")
    file = copy / only if only is not None else draw.choice(files)
    before = file.read_bytes()
    changed = changes(draw)(before) if only is None else flip_digit(before, draw)
    if changed == before:
        return "unchanged"
    file.write_bytes(changed)
    what = f"seed {seed}: {file.relative_to(copy)}"
    try:
        again = run(CONFIG, copy, data=blobs, resume=True).directory
        RunDirectory(again).config()
        same = same_result(again, runs["finished"])
    except FedfaError:
        return "refused"  # at once, or by whoever reads the file
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert same, f"{what}: another result, silently"
    return "same result"


def flip_digit(content: bytes, draw: random.Random) -> bytes:
    places = [at for at, one in enumerate(content) if chr(one).isdigit()]
    data = bytearray(content)
    place = draw.choice(places)
    data[place] = ord(draw.choice([one for one in "0123456789" if ord(one) != data[place]]))
    return bytes(data)


@pytest.mark.parametrize("part", range(3))
def test_random_changes_of_a_run_directory_are_never_silent(
    part: int, runs: dict[str, Path], tmp_path: Path, blobs: DataSet
) -> None:
    found = [mutate(10_000 * part + seed, runs, tmp_path, blobs) for seed in range(15)]
    assert found.count("refused") >= 5


def test_a_digit_changed_in_the_config_is_refused(runs: dict[str, Path], tmp_path: Path, blobs: DataSet) -> None:
    assert [mutate(seed, runs, tmp_path, blobs, "config.toml") for seed in range(15)] == ["refused"] * 15


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_changes(part: int, runs: dict[str, Path], tmp_path: Path, blobs: DataSet) -> None:
    found = [mutate(100 * part + seed, runs, tmp_path, blobs) for seed in range(100)]
    print({kind: found.count(kind) for kind in sorted(set(found))})  # noqa: T201  (pytest shows it)


@pytest.mark.slow
def test_two_hundred_digits_changed_in_the_config(runs: dict[str, Path], tmp_path: Path, blobs: DataSet) -> None:
    assert {mutate(seed, runs, tmp_path, blobs, "config.toml") for seed in range(200)} == {"refused"}


def test_a_changed_config_says_what_to_do(runs: dict[str, Path], tmp_path: Path, blobs: DataSet) -> None:
    """So the number of final steps in a saved config can no longer be changed into an error of the method."""
    copy = Path(shutil.copytree(runs["stopped"], tmp_path / "copy"))
    config = copy / "config.toml"
    config.write_text(re.sub(r"(?m)^steps = 0$|^rounds = 3$", "rounds = 5", config.read_text()))
    with pytest.raises(RunError, match=r"config\.toml was changed after the run was started; restore it, or start"):
        run(CONFIG, copy, data=blobs, resume=True)


def test_directories_of_earlier_releases_have_no_digests_and_continue(
    runs: dict[str, Path], tmp_path: Path, blobs: DataSet
) -> None:
    copy = Path(shutil.copytree(runs["stopped"], tmp_path / "copy"))
    forget_digests(copy)
    again = run(CONFIG, copy, data=blobs, resume=True).directory
    assert same_result(again, runs["finished"])


# -- full disks -------------------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no small file system can be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_reported_in_words_and_leaves_the_files_as_they_were(small_disk: Path) -> None:
    write_atomically(small_disk / "kept", b"x" * 8192)
    append_line(small_disk / "lines.jsonl", {"round": 1})
    with pytest.raises(RunError, match=r"is full: kept was not written.* continue with --resume"):
        write_atomically(small_disk / "kept", b"y" * 80_000)
    assert (small_disk / "kept").read_bytes() == b"x" * 8192
    with pytest.raises(RunError, match=r"is full: lines\.jsonl was not written"):
        append_line(small_disk / "lines.jsonl", {"round": 2, "text": "z" * 80_000})
    assert read_lines(small_disk / "lines.jsonl") == [{"round": 1}]
    assert sorted(file.name for file in small_disk.iterdir()) == ["kept", "lines.jsonl"]


def test_a_run_on_a_full_disk_ends_in_words(small_disk: Path, blobs: DataSet) -> None:
    with pytest.raises(RunError, match="is full"):
        run(small("scaffold", rounds=200, checkpoint={"every": 1}), small_disk / "run", data=blobs)


# -- configs that used to end in a raw exception ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"local": {"lr": float("inf")}}, "local.lr"),
        ({"local": {"weight_decay": float("inf")}}, "local.weight_decay"),
        ({"algorithm": {"name": "fedfa", "anchors": {"mu": float("inf")}}}, "algorithm.anchors.mu"),
        ({"algorithm": {"name": "fedfa", "final": {"lr": float("inf")}}}, "algorithm.final.lr"),
        ({"algorithm": {"name": "fedetf"}, "model": {"options": {"hidden": [0]}}}, "at least one unit"),
        ({"data": {"clients": 10**9, "partition": "iid"}}, "at most 10000000 clients"),
    ],
)
def test_values_that_no_run_can_use_are_refused_in_words(
    change: dict[str, object], problem: str, tmp_path: Path, blobs: DataSet
) -> None:
    with pytest.raises(FedfaError, match=problem):
        run(small("fedfa", **change), tmp_path / "run", data=blobs)
