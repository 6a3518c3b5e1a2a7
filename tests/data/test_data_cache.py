"""The cache: whole or absent, checked, shared between processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfa.data import cache, load
from fedfa.data.definition import LoadOther
from fedfa.data.raw import RawDataSet, RawSamples
from fedfa.data.sets import DEFINITIONS
from fedfa.errors import DataError


def test_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDFA_DATA", raising=False)
    assert cache.data_directory() == tmp_path / ".cache" / "fedfa"
    monkeypatch.setenv("FEDFA_DATA", str(tmp_path / "elsewhere"))
    assert cache.data_directory() == tmp_path / "elsewhere"
    assert cache.data_directory(tmp_path / "given") == tmp_path / "given"


def stored(directory: Path, name: str = "train.inputs") -> Path:
    return cache.folder_of(directory, "fashion-mnist") / f"{name}.npy"


def test_stored_and_opened_again(tiny_fashion: Path, tmp_path: Path) -> None:
    first = load("fashion-mnist", source=tiny_fashion, data_dir=tmp_path / "cache")
    before = stored(tmp_path / "cache").stat().st_mtime_ns
    second = load("fashion-mnist", data_dir=tmp_path / "cache", offline=True)
    assert second.fingerprint == first.fingerprint
    assert second.manifest["edition"] == "tiny"
    assert second.train.inputs.shape == (40, 28, 28, 1)
    assert stored(tmp_path / "cache").stat().st_mtime_ns == before


@pytest.mark.parametrize("array", ["train.inputs", "train.labels", "test.inputs", "test.labels"])
@pytest.mark.parametrize("damage", ["truncate", "tamper", "remove"])
def test_a_damaged_cache_is_refused_by_name(tiny_fashion: Path, tmp_path: Path, array: str, damage: str) -> None:
    directory = tmp_path / "cache"
    load("fashion-mnist", source=tiny_fashion, data_dir=directory)
    path = stored(directory, array)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-5])
    elif damage == "tamper":
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(DataError, match=array.replace(".", r"\.")) as caught:
        load("fashion-mnist", data_dir=directory, offline=True)
    assert "--again" in str(caught.value)
    load("fashion-mnist", source=tiny_fashion, data_dir=directory, again=True)
    load("fashion-mnist", data_dir=directory, offline=True)


def test_a_copied_cache_is_verified_once(tiny_fashion: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    load("fashion-mnist", source=tiny_fashion, data_dir=directory)
    os.utime(stored(directory), ns=(1, 1))  # as after a copy: same content, another time
    load("fashion-mnist", data_dir=directory, offline=True)
    noted = json.loads((stored(directory).parent / "checked.json").read_text())
    assert noted["train.inputs"][1] == 1


def test_a_write_to_the_tensors_stays_private(tiny_fashion: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    dataset = load("fashion-mnist", source=tiny_fashion, data_dir=directory)
    first = int(dataset.train.inputs[0, 0, 0, 0])
    dataset.train.inputs[0, 0, 0, 0] = (first + 1) % 256
    assert int(load("fashion-mnist", data_dir=directory).train.inputs[0, 0, 0, 0]) == first


def test_nothing_is_left_when_storing_fails(
    tiny_fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space"):
        load("fashion-mnist", source=tiny_fashion, data_dir=tmp_path / "cache")
    assert not cache.is_cached(tmp_path / "cache", "fashion-mnist")
    assert [path.name for path in (tmp_path / "cache" / "sets").iterdir()] == [".fashion-mnist.lock"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match="--data-dir"):
        load("digits", data_dir=blocked / "below")


# Forked, because a fresh process would spend seconds on importing torch.
forked = multiprocessing.get_context("fork") if hasattr(os, "fork") else None
needs_fork = pytest.mark.skipif(forked is None, reason="this system cannot fork")


def make_slowly(directory: Path, start: Any, results: Any) -> None:
    known = DEFINITIONS["digits"]

    def make(load: LoadOther) -> RawDataSet:
        with (directory / "made").open("a") as file:
            file.write("x")
        time.sleep(1)
        assert known.make is not None
        return known.make(load)

    DEFINITIONS["digits"] = replace(known, make=make)  # type: ignore[index]  # a Mapping, but a dict
    start.wait()
    results.put(load("digits", data_dir=directory).fingerprint)


@needs_fork
def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    assert forked is not None
    start, results = forked.Event(), forked.Queue()
    both = [forked.Process(target=make_slowly, args=(tmp_path, start, results)) for _ in range(2)]
    for process in both:
        process.start()
    start.set()
    fingerprints = [results.get(timeout=60) for _ in both]
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert fingerprints[0] == fingerprints[1] != ""
    assert (tmp_path / "made").read_text() == "x"


def fashion_sized(directory: Path) -> None:
    pixels = np.arange(60000 * 784, dtype=np.uint32).astype(np.uint8).reshape(60000, 28, 28)
    raw = RawDataSet(RawSamples(pixels, np.arange(60000) % 10), RawSamples(pixels[:10000], np.arange(10000) % 10))
    cache.write(raw, "big", directory, {"classes": [str(number) for number in range(10)]})


def report_sharing(directory: Path, both_ready: Any, results: Any) -> None:
    data = cache.open_cached(directory, "big")
    assert int(data.train.inputs.sum()) > 0  # reads every page
    both_ready.wait(60)
    text = Path("/proc/self/smaps").read_text()
    block = text[text.index("train.inputs.npy") :]
    found = [re.search(rf"^{key}: +(\d+) kB", block, re.M) for key in ("Rss", "Pss", "Private_Dirty")]
    results.put([int(match[1]) for match in found if match])
    both_ready.wait(60)  # both map the file until both have measured


@needs_fork
def test_fashion_mnist_opens_fast_and_is_shared_between_processes(tmp_path: Path) -> None:
    assert forked is not None
    fashion_sized(tmp_path)
    began = time.perf_counter()
    cache.open_cached(tmp_path, "big")
    assert time.perf_counter() - began < 0.5
    if not Path("/proc/self/smaps").exists():
        pytest.skip("this system does not tell how pages are shared")
    both_ready, results = forked.Barrier(2), forked.Queue()
    both = [forked.Process(target=report_sharing, args=(tmp_path, both_ready, results)) for _ in range(2)]
    for process in both:
        process.start()
    for _ in both:
        resident, proportional, own = results.get(timeout=60)
        assert resident > 45_000  # kB: all of it is mapped
        assert own == 0  # and none of it copied
        assert proportional < 0.6 * resident  # because the other process holds the same pages
    for process in both:
        process.join(timeout=60)
