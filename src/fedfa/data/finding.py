"""Looking for a data set's files in a folder, under the names and sub-folders that people use."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path


class NotHereError(Exception):
    """A folder does not hold the files that a reader needs; another reader or folder may be tried."""


class Finder:
    """Finds files by name in a folder.

    Sub-folders named after the data set are looked through first and to any depth (three levels), the folder itself
    next, so that one folder may hold many sets with equal file names.

    Args:
        folder: Where to look.
        names: Names of sub-folders that belong to the data set, e.g. ``("svhn", "SVHN")``.
    """

    def __init__(self, folder: Path, names: tuple[str, ...] = ()) -> None:
        self.folder = folder
        own = [folder / name for name in names if (folder / name).is_dir()]
        self._places = [place for start in own for place in _folders_below(start, depth=3)] + [folder]

    def find(self, *names: str) -> Path:
        """The first file that has one of these names, or raise :class:`NotHereError` naming them."""
        for place in self._places:
            for name in names:
                if (place / name).is_file():
                    return place / name
        raise NotHereError(" or ".join(names))

    def find_folder(self, *names: str) -> Path:
        """The first sub-folder that has one of these names, or raise :class:`NotHereError`."""
        for place in self._places:
            for name in names:
                if (place / name).is_dir():
                    return place / name
        raise NotHereError(" or ".join(f"{name}/" for name in names))

    def glob(self, pattern: str) -> list[Path]:
        """All files of the first place that has any that match, sorted by name."""
        for place in self._places:
            found = sorted(path for path in place.iterdir() if path.is_file() and fnmatch(path.name, pattern))
            if found:
                return found
        raise NotHereError(pattern)


def _folders_below(start: Path, depth: int) -> Iterator[Path]:
    yield start
    if depth:
        for child in sorted(start.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _folders_below(child, depth - 1)
