"""Search for a data set's files in a folder, under the usual names and sub-folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from fedfa.data.samples import DataSet

#: Loads another data set that the wanted one is built from.
LoadOther = Callable[[str], DataSet]


class FilesNotFoundError(Exception):
    """A folder lacks the files that a reader needs; another reader or folder may be tried."""


class FileFinder:
    """Finds files by name in a folder.

    Sub-folders named after the data set come first, three levels deep, then the folder itself, so that one folder may
    hold many sets with equal file names.

    Args:
        folder: Folder to search.
        names: Names of sub-folders that belong to the data set, e.g. ``("svhn", "SVHN")``.
        load: Loads another data set, for readers of sets that are built from it.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], load: LoadOther) -> None:
        starts = [folder / name for name in names if (folder / name).is_dir()]
        self._folders = [below for start in starts for below in _folders_below(start, depth=3)] + [folder]
        self.load = load

    def find(self, *names: str) -> Path:
        """The first file with one of these names.

        Raises:
            FilesNotFoundError: There is none.
        """
        return self._first(names, Path.is_file, "")

    def find_folder(self, *names: str) -> Path:
        """The first sub-folder with one of these names; raises like :meth:`find`."""
        return self._first(names, Path.is_dir, "/")

    def _first(self, names: tuple[str, ...], exists: Callable[[Path], bool], mark: str) -> Path:
        for folder in self._folders:
            for name in names:
                if exists(folder / name):
                    return folder / name
        raise FilesNotFoundError(" or ".join(f"{name}{mark}" for name in names))


def _folders_below(start: Path, depth: int) -> Iterator[Path]:
    yield start
    if depth:
        for child in sorted(start.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _folders_below(child, depth - 1)
