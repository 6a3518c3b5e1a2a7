"""What a site keeps between rounds, on its own disk: control variates, duals, the last model, its own layers.

Flower keeps a client's memory in the SuperNode's process and loses it with that. Here every version is a file of its
own, written whole or not at all. **The server decides which version counts**: it names, in each message, the version
that came out of the last round whose update it accepted. So a message that is repeated gives the same result, an update
that was late or rejected leaves no trace, and a server that goes on from a checkpoint takes its sites back with it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedfa.errors import RunError
from fedfa.learning.tensors import PartTensors, flatten, unflatten
from fedfa.studies.files import load_tensors, save_tensors

ENVIRONMENT_VARIABLE = "FEDFA_STATE"
_UNFINISHED = 3600.0
"""Seconds after which a file that somebody began to write is given up."""
_RUN_NAME = re.compile(r"[0-9a-f]{8,64}")


def state_directory(given: str | None = None, environment: Mapping[str, str] | None = None) -> Path:
    """Where sites keep state: what the node config says, else ``FEDFA_STATE``, else below the user's own folder.

    Example:
        >>> str(state_directory(None, {"FEDFA_STATE": "/var/lib/fedfa"}))
        '/var/lib/fedfa'
    """
    named = given or (os.environ if environment is None else environment).get(ENVIRONMENT_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".local" / "state" / "fedfa" / "flower"


class SiteState:
    """The state of one client in one run.

    Args:
        directory: See :func:`state_directory`.
        run: The run's key, as the server made it.
        client: The client's number.

    Raises:
        RunError: The key is none (it becomes the name of a folder), or the folder cannot be written.
    """

    def __init__(self, directory: Path, run: str, client: int) -> None:
        if not _RUN_NAME.fullmatch(run):
            raise RunError(f"{run!r} is not the key of a run")
        self.folder, self._client = directory / run, int(client)

    def load(self, version: int) -> PartTensors | None:
        """What was kept as this version; None if it is not there.

        Raises:
            RunError: The file is damaged.
        """
        path = self._file(version)
        return unflatten(load_tensors(path)) if path.exists() else None

    def save(self, version: int, kept: PartTensors) -> None:
        """Keep this; a version that is there already is replaced."""
        try:
            # What was learnt from a site's data is for the site's own user.
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_tensors(self._file(version), flatten(kept))
        except OSError as error:
            raise RunError(
                f"cannot keep state in {self.folder}: {error.strerror}; name another folder with state-dir in the node "
                "config"
            ) from None

    def keep_only(self, versions: Iterable[int]) -> None:
        """Forget all others, and what a process left unfinished long ago.

        Not what was begun just now: a site may still be at work on a message whose time is over, beside the next one.
        """
        wanted = {self._file(version) for version in versions}
        for path in self.folder.glob(f"site{self._client}.round*.safetensors"):
            if path not in wanted:
                path.unlink(missing_ok=True)
        for leftover in self.folder.glob(f".site{self._client}.round*.tmp"):
            try:
                if time.time() - leftover.stat().st_mtime > _UNFINISHED:
                    leftover.unlink()
            except FileNotFoundError:  # it is finished now
                continue

    def versions(self) -> list[int]:
        """Which versions are there."""
        names = self.folder.glob(f"site{self._client}.round*.safetensors")
        return sorted(int(path.name.split(".round")[1].removesuffix(".safetensors")) for path in names)

    def _file(self, version: int) -> Path:
        return self.folder / f"site{self._client}.round{int(version)}.safetensors"
