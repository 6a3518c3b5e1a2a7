"""Files at their published web addresses."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedfa.data.definition import Progress, ReadFolder, Unavailable
from fedfa.data.formats.untrusted_files import check_md5
from fedfa.data.raw import RawDataSet

_SECONDS_WITHOUT_ANSWER = 20


@dataclass(frozen=True)
class WebFiles:
    """Files at a web address.

    Attributes:
        base: Address of their folder.
        files: Names with their published MD5, where there is one.
    """

    base: str
    files: tuple[tuple[str, str | None], ...]

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
