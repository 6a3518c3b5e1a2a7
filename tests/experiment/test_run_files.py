from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from fedfa.errors import RunError
from fedfa.experiment.files import load_tensors, save_tensors, write_atomically

TENSORS = {
    "weights": torch.arange(1000, dtype=torch.float32),
    "counter": torch.tensor(3),
    "empty": torch.zeros(0, 2),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "flag": torch.tensor([True, False]),
}


def test_tensors_come_back(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", TENSORS)
    back = load_tensors(tmp_path / "x.safetensors")
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[n], v) and back[n].dtype == v.dtype for n, v in TENSORS.items())
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_any_memory_layout_is_stored(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 4, 4)
    odd = {"a": x.to(memory_format=torch.channels_last), "b": x.transpose(0, 1), "c": torch.ones(1).expand(5)}
    save_tensors(tmp_path / "x.safetensors", odd)
    assert all(torch.equal(load_tensors(tmp_path / "x.safetensors")[n], v) for n, v in odd.items())


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9, 0.99])
def test_a_flipped_bit_in_a_tensor_is_caught(tmp_path: Path, where: float) -> None:
    file = tmp_path / "x.safetensors"
    save_tensors(file, {"weights": TENSORS["weights"]})
    content = bytearray(file.read_bytes())
    start = len(content) - 4000  # the tensor's bytes stand at the end
    content[start + int(where * 4000)] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"x\.safetensors is damaged.*checksum"):
        load_tensors(file)


@pytest.mark.parametrize("length", [0, 4, 50, 2000, -1])
def test_a_truncated_file_is_caught(tmp_path: Path, length: int) -> None:
    file = tmp_path / "x.safetensors"
    save_tensors(file, TENSORS)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(RunError, match=r"x\.safetensors is damaged"):
        load_tensors(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"x\.safetensors is missing"):
        load_tensors(tmp_path / "x.safetensors")


def test_writing_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    write_atomically(file, "old")
    write_atomically(file, "neu")
    assert file.read_text() == "neu"
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_while_writing_leaves_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    write_atomically(file, "old")
    with pytest.raises(TypeError):
        write_atomically(file, 3)  # type: ignore[arg-type]  # wrong on purpose
    assert file.read_text() == "old"


def _write_for_ever(path: Path, written: Event) -> None:
    for number in itertools.count():
        write_atomically(path, bytes([number % 256]) * 2_000_000)
        written.set()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_writer_that_is_killed_never_leaves_a_partial_file(tmp_path: Path) -> None:
    """Twelve real kills while two megabytes at a time are being written: always one whole version."""
    file = tmp_path / "big"
    context = multiprocessing.get_context("fork")  # a fresh interpreter per kill would take its time
    leftovers = 0
    for number in range(12):
        written = context.Event()
        writer = context.Process(target=_write_for_ever, args=(file, written))
        writer.start()
        assert written.wait(30)
        time.sleep(0.0009 * number)
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        content = file.read_bytes()
        assert len(content) == 2_000_000
        assert len(set(content)) == 1
        leftovers += sum(beside != file for beside in tmp_path.iterdir())
    assert leftovers > 0, "no kill fell into the writing: the test shows nothing"
