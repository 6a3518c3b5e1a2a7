"""Definition of a data set: how to find and read its files, where to get them, and how to verify them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from fedfa.data.formats.untrusted_files import check_md5
from fedfa.data.raw import RawDataSet
from fedfa.data.samples import DataSet
from fedfa.errors import DataError

#: Loads another data set that the wanted one is built from.
LoadOther = Callable[[str], DataSet]


class FilesNotFoundError(Exception):
    """A folder lacks the files that a reader needs; another reader or folder may be tried."""


class FileFinder:
    """Finds files by name in a folder.

    Sub-folders named after the data set come first, three levels deep, then the folder itself, so that one folder may
    hold many sets with equal file names. ``load`` loads another data set, for readers of sets that are built from it.
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


#: Called with ``(what, done, total)`` during downloads; the total may be unknown.
Progress = Callable[[str, int, int | None], None]
#: Reads the data set's files in a folder.
ReadFolder = Callable[[Path], RawDataSet]


def no_progress(what: str, done: int, total: int | None) -> None:
    """Ignore progress reports."""


@dataclass(frozen=True)
class Edition:
    """A content that is accepted as the data set."""

    name: str
    """E.g. ``"complete"`` or ``"subset"``."""
    train: int = 0
    """Number of training samples; 0 accepts any number."""
    test: int = 0
    """Number of test samples."""
    class_counts: tuple[int, ...] | None = None
    """Training samples per class, where known."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the arrays, where known. Otherwise the published MD5s of the files are checked, if there are any, and
    counts and class balance."""

    def fits(self, raw: RawDataSet) -> bool:
        """Whether the number of samples is this edition's."""
        return not self.train or (self.train, self.test) == (len(raw.train.inputs), len(raw.test.inputs))


@dataclass(frozen=True)
class Reader:
    """Reads one of the file formats that a data set comes in."""

    files: str
    """The files it needs, for messages."""
    read: Callable[[FileFinder], RawDataSet]
    """Reads them, or raises :class:`FilesNotFoundError`."""


class Unavailable(Exception):  # noqa: N818 - a finding that the search reports, not an error of its own
    """A provider cannot deliver here and now; the message states why."""


class Provider(Protocol):
    """A network source of a data set; ``kind`` is its short name."""

    kind: ClassVar[str]

    @property
    def label(self) -> str:
        """Name of the source in messages."""

    def obtain(self, workspace: Path, read: ReadFolder, progress: Progress) -> RawDataSet:
        """Download into a temporary folder and read it, or raise :class:`Unavailable`."""


@dataclass(frozen=True)
class DataSetDefinition:
    """A data set that can be loaded by name."""

    name: str
    title: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Height, width and channels of an image."""
    homepage: str
    """Address of its description."""
    terms: str
    """Licence or terms of use."""
    editions: tuple[Edition, ...] = ()
    """Contents that are accepted; empty accepts any."""
    readers: tuple[Reader, ...] = ()
    providers: tuple[Provider, ...] = ()
    """Network sources, in order."""
    make: Callable[[LoadOther], RawDataSet] | None = None
    """Generates the set, where it is not read from files."""
    made_of: str = ""
    """What it is generated from."""
    folders: tuple[str, ...] = ()
    """Names of sub-folders that hold its files."""
    domains: tuple[str, ...] = ()

    def read(self, folder: Path, load: LoadOther) -> RawDataSet:
        """Read the set from a folder with the first reader whose files are there.

        Raises:
            FilesNotFoundError: No reader found its files.
            DataError: Files are damaged.
        """
        finder = FileFinder(folder, (self.name, *self.folders), load)
        missing = []
        for reader in self.readers:
            try:
                return reader.read(finder)
            except FilesNotFoundError as error:
                missing.append(str(error))
        raise FilesNotFoundError("; ".join(missing))

    def verify(self, raw: RawDataSet) -> Edition | None:
        """Check the content against the known editions.

        Returns:
            The edition, or None for a set without editions.

        Raises:
            DataError: It is none of them; the message names the file.
        """
        raw.check_shapes(len(self.classes))
        for array, values in (("train.inputs", raw.train.inputs), ("test.inputs", raw.test.inputs)):
            if values.shape[1:] != self.shape:
                raise DataError(
                    f"{raw.file_of(array)}: images of shape {list(values.shape[1:])}, "
                    f"but {self.name} has {list(self.shape)}"
                )
        if not self.editions:
            return None
        possible = [edition for edition in self.editions if raw.claims in (None, edition.name)]
        edition = next((edition for edition in possible if edition.fits(raw)), None)
        if edition is None:
            expected = " or ".join(f"{known.train:,} + {known.test:,} ({known.name})" for known in possible)
            raise DataError(
                f"{self.name}: {raw.file_of('train.inputs')} and {raw.file_of('test.inputs')} hold "
                f"{len(raw.train.inputs):,} training + {len(raw.test.inputs):,} test samples; known: {expected}"
            )
        if not edition.digests:
            for path, md5 in raw.published_md5.items():
                check_md5(path, md5)
        digests = raw.digests() if edition.digests else {}
        wrong = [array for array, expected in edition.digests.items() if digests.get(array) != expected]
        if wrong:
            named = ", ".join(dict.fromkeys(raw.file_of(array) for array in wrong))
            raise DataError(
                f"{self.name}: the content of {named} is not the known one (checksum of {', '.join(wrong)} differs): "
                "the file is damaged, tampered with or of another data set"
            )
        counts = tuple(np.bincount(raw.train.labels, minlength=len(self.classes)).tolist())
        if edition.class_counts not in (None, counts):
            raise DataError(
                f"{self.name}: {raw.file_of('train.labels')} has {counts} samples per class; "
                f"known are {edition.class_counts}"
            )
        return edition
