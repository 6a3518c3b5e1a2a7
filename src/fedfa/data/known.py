"""What is known about a data set: how to read it, where to get it, and how to tell that it is the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from fedfa.data.decoded import Decoded, digests
from fedfa.data.finding import Finder, NotHereError
from fedfa.data.formats.files import check_md5
from fedfa.data.samples import DataSet
from fedfa.errors import DataError

#: Loads another data set that this one is made of.
Parts = Callable[[str], DataSet]
#: Told ``(what, done, total)`` while something is fetched; the total may be unknown.
Progress = Callable[[str, int, int | None], None]


def no_progress(what: str, done: int, total: int | None) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Edition:
    """One content that is accepted under a name.

    Attributes:
        name: E.g. ``"complete"`` or ``"subset of 15,000 / 6,000"``.
        train: Number of training samples; 0 where any number is right.
        test: Number of test samples.
        class_counts: Training samples per class, where known.
        digests: SHA-256 of the arrays, where known. Where it is not, the reader has checked the files' published MD5s
            or there are none, and counts and class balance decide.
    """

    name: str
    train: int = 0
    test: int = 0
    class_counts: tuple[int, ...] | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    def fits(self, decoded: Decoded) -> bool:
        """Whether the number of samples is this edition's."""
        return not self.train or (self.train, self.test) == (len(decoded.train.inputs), len(decoded.test.inputs))


@dataclass(frozen=True)
class Reader:
    """One way in which the files of a data set come.

    Attributes:
        files: The files it needs, for advice to the user.
        read: Reads them, or raises :class:`NotHereError`.
    """

    files: str
    read: Callable[[Finder, Parts], Decoded]


class Unavailable(Exception):  # noqa: N818 - a finding that the search reports, not an error of its own
    """A provider cannot deliver here and now; the message says why."""


class Provider(Protocol):
    """A place on the network that a data set comes from; ``kind`` is its short name."""

    kind: ClassVar[str]

    @property
    def label(self) -> str:
        """What to call it in messages."""

    def obtain(self, known: KnownSet, workspace: Path, parts: Parts, progress: Progress) -> Decoded:
        """Fetch into a temporary folder and read, or raise :class:`Unavailable`."""


@dataclass(frozen=True)
class KnownSet:
    """A data set that can be loaded by name.

    Attributes:
        name: That name.
        title: One line about it.
        classes: Names of its classes.
        shape: Height, width and channels of an image.
        homepage: Where it is described.
        terms: Licence or terms of use.
        editions: Contents that are accepted. Empty for sets that are made here.
        readers: How its files are read.
        providers: Where it is fetched from, in order.
        make: Makes the set, where it is made and not read.
        made_of: What it is made of, in words.
        folders: Names of sub-folders that hold its files.
        domains: Names of its domains.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    homepage: str
    terms: str
    editions: tuple[Edition, ...] = ()
    readers: tuple[Reader, ...] = ()
    providers: tuple[Provider, ...] = ()
    make: Callable[[Parts], Decoded] | None = None
    made_of: str = ""
    folders: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()

    def read(self, folder: Path, parts: Parts) -> Decoded:
        """Read the set from a folder with the first reader whose files are there.

        Raises:
            NotHereError: No reader found its files.
            DataError: Files are there but damaged.
        """
        finder = Finder(folder, (self.name, *self.folders))
        missing = []
        for reader in self.readers:
            try:
                return reader.read(finder, parts)
            except NotHereError as error:
                missing.append(str(error))
        raise NotHereError("; ".join(missing))

    def verify(self, decoded: Decoded) -> Edition | None:
        """Check what was read against the known editions; the message of a refusal names the file.

        Returns:
            The edition it is, or None for a set without editions.
        """
        decoded.check_shapes(len(self.classes))
        self._check_shape(decoded)
        if not self.editions:
            return None
        possible = [edition for edition in self.editions if decoded.claims in (None, edition.name)]
        edition = next((edition for edition in possible if edition.fits(decoded)), None)
        if edition is None:
            expected = " or ".join(f"{known.train:,} + {known.test:,} ({known.name})" for known in possible)
            raise DataError(
                f"{self.name}: {decoded.file_of('train.inputs')} and {decoded.file_of('test.inputs')} hold "
                f"{len(decoded.train.inputs):,} training + {len(decoded.test.inputs):,} test samples; known: {expected}"
            )
        if not edition.digests:
            for path, md5 in decoded.published_md5.items():
                check_md5(path, md5)
        sums = digests(decoded) if edition.digests else {}
        wrong = [array for array, expected in edition.digests.items() if sums.get(array) != expected]
        if wrong:
            named = ", ".join(dict.fromkeys(decoded.file_of(array) for array in wrong))
            raise DataError(
                f"{self.name}: the content of {named} is not the known one (checksum of {', '.join(wrong)} differs): "
                "the file is damaged, tampered with or of another data set"
            )
        self._check_balance(decoded, edition)
        return edition

    def _check_shape(self, decoded: Decoded) -> None:
        for array, values in (("train.inputs", decoded.train.inputs), ("test.inputs", decoded.test.inputs)):
            if values.shape[1:] != self.shape:
                raise DataError(
                    f"{decoded.file_of(array)}: images of shape {list(values.shape[1:])}, "
                    f"but {self.name} has {list(self.shape)}"
                )

    def _check_balance(self, decoded: Decoded, edition: Edition) -> None:
        counts = tuple(np.bincount(decoded.train.labels.astype(np.int64), minlength=len(self.classes)).tolist())
        if edition.class_counts is not None and counts != edition.class_counts:
            raise DataError(
                f"{self.name}: {decoded.file_of('train.labels')} has {counts} samples per class; "
                f"known are {edition.class_counts}"
            )
