"""Finding, obtaining, checking, caching and opening data sets."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedfa.data import cache
from fedfa.data.decoded import Decoded
from fedfa.data.finding import NotHereError
from fedfa.data.known import KnownSet, Parts, Progress, Unavailable, no_progress
from fedfa.data.own import from_path
from fedfa.data.samples import DataSet
from fedfa.data.sets import KNOWN
from fedfa.errors import DataError

log = logging.getLogger(__name__)

#: Where Debian's data set packages put their files.
SYSTEM_COPIES = Path("/usr/share/datasets")


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    offline: bool = False,
    source: Path | None = None,
    again: bool = False,
    unverified: bool = False,
    progress: Progress = no_progress,
) -> DataSet:
    """Load a data set by name, or the user's own from a path.

    The first time it is searched for in the data directory, among the system's copies and at its providers, checked
    against what is known of it and converted; from then on it is opened from the cache.

    Args:
        name: A name from :func:`known_names`, or the path of an ``.npz`` file or of a folder of class folders.
        data_dir: Where data is kept; default: the environment variable ``FEDFA_DATA``, else ``~/.cache/fedfa``.
        offline: Make no network call whatsoever.
        source: Read the set's files from this folder and look nowhere else.
        again: Obtain it anew although it is cached.
        unverified: Accept content that is not the known one; the manifest then says so.
        progress: Told about downloads.

    Raises:
        DataError: Not found, not obtainable or not the right content; says what was tried and what to do.

    Example:
        >>> digits = load("digits")
        >>> len(digits.train), digits.classes[:3]
        (1442, ('0', '1', '2'))
    """
    directory = cache.data_directory(data_dir)
    if name not in KNOWN:
        if source is not None and Path(name).expanduser().exists():
            raise DataError(
                f"{name!r} is no known data set; a file or folder of yours is read where it is, without --from"
            )
        return from_path(name, directory, again=again)
    search = _Search(directory, offline, source, unverified, progress)
    return search.open(KNOWN[name], again=again)


def known_names() -> tuple[str, ...]:
    """Names that :func:`load` knows."""
    return tuple(KNOWN)


@dataclass(frozen=True)
class _Search:
    """One call of :func:`load`: its settings, and the steps of the search."""

    directory: Path
    offline: bool
    source: Path | None
    unverified: bool
    progress: Progress
    is_part: bool = False

    def open(self, known: KnownSet, again: bool = False) -> DataSet:
        """Open from the cache, after obtaining it where needed."""
        if again or not cache.is_cached(self.directory, known.name):
            with cache.locked_for(self.directory, known.name):
                # Another process may have made it while this one waited for the lock.
                if again or not cache.is_cached(self.directory, known.name):
                    decoded, where, edition = self._find(known)
                    manifest = _manifest(known, decoded, where, edition)
                    cache.write(decoded, known.name, self.directory, manifest, replace=again)
                    log.info("stored %s from %s in %s", known.name, where, self.directory)
        return cache.open_cached(self.directory, known.name)

    def _part(self, name: str) -> DataSet:
        """Open a set that the wanted one is made of; a given folder may hold it, but need not."""
        return replace(self, is_part=True).open(KNOWN[name])

    def _find(self, known: KnownSet) -> tuple[Decoded, str, str]:
        """The set's content, where it came from and which edition it is."""
        if known.make is not None:
            decoded = known.make(self._part)
            return decoded, f"made here: {known.made_of}", self._accept(known, decoded)
        if self.source is not None and not self.is_part:
            decoded = _from_source(known, self.source, self._part)
            return decoded, "files of the user", self._accept(known, decoded)
        tried: list[str] = []
        for label, folder in self._folders(known):
            try:
                decoded = known.read(folder, self._part)
                return decoded, label, self._accept(known, decoded)
            except NotHereError:
                tried.append(f"{label} ({folder}): not there")
            except DataError as error:
                log.warning("%s", error)
                tried.append(f"{label}: {error}")
        if self.offline:
            tried.append("network: not tried, because offline is set")
        else:
            for provider in known.providers:
                try:
                    with tempfile.TemporaryDirectory(prefix="fedfa-") as workspace:
                        decoded = provider.obtain(known, Path(workspace), self._part, self.progress)
                        return decoded, provider.label, self._accept(known, decoded)
                except (Unavailable, NotHereError, DataError) as error:
                    log.info("%s: %s", provider.label, error)
                    tried.append(f"{provider.label}: {error}")
        raise DataError(_advice(known, self.directory, tried))

    def _folders(self, known: KnownSet) -> list[tuple[str, Path]]:
        """Folders on this machine to look in: files the user put into the data directory, then the system's copy."""
        folders = [] if self.source is None else [("the given folder", self.source)]
        folders.append(("data directory", self.directory))
        names = (known.name, *known.folders)
        folders += [("system copy", SYSTEM_COPIES / name) for name in names if (SYSTEM_COPIES / name).is_dir()]
        return [(label, folder) for label, folder in folders if folder.is_dir()]

    def _accept(self, known: KnownSet, decoded: Decoded) -> str:
        """Name of the edition that the content is, or refuse it."""
        try:
            edition = known.verify(decoded)
        except DataError as error:
            # What is made here cannot be tampered with; another version of a library may have made it differently.
            if not self.unverified and known.make is None:
                raise
            log.warning("accepted although not the reference content: %s", error)
            decoded.check_shapes(len(known.classes))
            return "unverified"
        return edition.name if edition else "made here"


def _from_source(known: KnownSet, source: Path, parts: Parts) -> Decoded:
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; --from names a folder that holds the files of {known.name}")
    try:
        return known.read(source, parts)
    except NotHereError as error:
        raise DataError(
            f"{source}: no files of {known.name} there; looked for {error}. {_files_wanted(known)}"
        ) from error


def _files_wanted(known: KnownSet) -> str:
    ways = "; or ".join(reader.files for reader in known.readers)
    return f"It is read from: {ways}."


def _advice(known: KnownSet, directory: Path, tried: list[str]) -> str:
    lines = [f"{known.name} is not here and could not be obtained. Tried:", *(f"  - {what}" for what in tried)]
    lines.append("What to do:")
    lines.append(f"  - put its files into {directory / known.name}, or run: fedfa data get {known.name} --from FOLDER")
    lines.append(f"    {_files_wanted(known)}")
    lines.append(f"  - they are described at {known.homepage}")
    return "\n".join(lines)


def _manifest(known: KnownSet, decoded: Decoded, where: str, edition: str) -> Mapping[str, object]:
    def about(part: str) -> dict[str, object]:
        arrays = decoded.train if part == "train" else decoded.test
        counts = np.bincount(arrays.labels.astype(np.int64), minlength=len(known.classes))
        result: dict[str, object] = {"samples": len(arrays.inputs), "per_class": counts.tolist()}
        if arrays.domains is not None:
            result["per_domain"] = np.bincount(arrays.domains.astype(np.int64), minlength=len(known.domains)).tolist()
        if arrays.writers is not None:
            result["writers"] = len(np.unique(arrays.writers))
        return result

    return {
        "title": known.title,
        "homepage": known.homepage,
        "terms": known.terms,
        "source": where,
        "edition": edition,
        "files": decoded.files,
        "classes": list(known.classes),
        "domains": list(known.domains),
        "train": about("train"),
        "test": about("test"),
        **decoded.notes,
    }
