"""Data sets that Debian packages carry, fetched and unpacked without root and without installing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedfa.data.decoded import Decoded
from fedfa.data.known import KnownSet, Parts, Progress, Unavailable
from fedfa.data.providers.commands import run


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package.

    Attributes:
        package: Its name.
        inside: Folder of the package that holds the files.
    """

    package: str
    inside: str

    kind: ClassVar[str] = "Debian"

    @property
    def label(self) -> str:
        """What to call it in messages."""
        return f"Debian package {self.package}"

    def obtain(self, known: KnownSet, workspace: Path, parts: Parts, progress: Progress) -> Decoded:
        """Fetch the package, unpack it into the workspace and read the set from there."""
        progress(self.label, 0, None)
        try:
            run("apt-get", *_QUIET, "download", self.package, folder=workspace, seconds=600)
        except Unavailable as first:
            if not any(words in str(first) for words in _NO_LISTS):
                raise
            # The machine has no package lists (a fresh container) or old ones: make private ones, which needs no root.
            private = _private_state(workspace)
            run("apt-get", *_QUIET, *private, "update", folder=workspace, seconds=300)
            run("apt-get", *_QUIET, *private, "download", self.package, folder=workspace, seconds=600)
        fetched = sorted(workspace.glob("*.deb"))
        if not fetched:
            raise Unavailable("apt-get downloaded nothing")
        run("dpkg-deb", "-x", str(fetched[0]), "unpacked", folder=workspace, seconds=300)
        progress(self.label, 1, 1)
        return known.read(workspace / "unpacked" / self.inside, parts)


#: What apt says when its lists are missing or name a version that is gone.
_NO_LISTS = ("Unable to locate package", "no installation candidate", "Can't select candidate", "404")
# As root, apt drops to a user who cannot write into our folder; as anyone else the option changes nothing.
_QUIET = ("-q", "-o", "Acquire::Retries=0", "-o", "APT::Sandbox::User=root", "-o", "Acquire::http::Timeout=20")


def _private_state(workspace: Path) -> tuple[str, ...]:
    for folder in ("apt/lists/partial", "apt/cache/archives/partial"):
        (workspace / folder).mkdir(parents=True)
    settings = {
        "Dir::State::lists": workspace / "apt/lists",
        "Dir::Cache": workspace / "apt/cache",
        "Debug::NoLocking": "true",
    }
    return tuple(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))
