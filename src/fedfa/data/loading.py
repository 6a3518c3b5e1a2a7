"""Finding, obtaining, checking, caching and opening data sets."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedfa.data import cache
from fedfa.data.decoded import Decoded
from fedfa.data.finding import NotHereError
from fedfa.data.known import KnownSet, Parts, Progress, Unavailable, no_progress
from fedfa.data.locks import locked
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
        (1437, ('0', '1', '2'))
    """
    directory = cache.data_directory(data_dir)
    if name not in KNOWN:
        return from_path(name, known=KNOWN)
    if cache.is_cached(directory, name) and not again:
        return cache.open_cached(directory, name)
    known = KNOWN[name]

    def parts(other: str) -> DataSet:
        return load(
            other, data_dir=directory, offline=offline, source=source, unverified=unverified, progress=progress
        )

    with _locked(directory, name):
        if not cache.is_cached(directory, name) or again:  # another process may have made it while we waited
            _obtain(known, directory, offline, source, again, unverified, parts, progress)
    return cache.open_cached(directory, name)


def known_names() -> tuple[str, ...]:
    """Names that :func:`load` knows."""
    return tuple(KNOWN)


def _locked(directory: Path, name: str):  # type: ignore[no-untyped-def]
    try:
        (directory / "sets").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{directory}: cannot keep data there ({error.strerror}); name another folder with --data-dir or "
            f"{cache.ENVIRONMENT_VARIABLE}"
        ) from error
    return locked(cache.lock_of(directory, name))


def _obtain(
    known: KnownSet,
    directory: Path,
    offline: bool,
    source: Path | None,
    again: bool,
    unverified: bool,
    parts: Parts,
    progress: Progress,
) -> None:
    decoded, where, edition = _search(known, directory, offline, source, unverified, parts, progress)
    cache.write(decoded, known.name, directory, _manifest(known, decoded, where, edition), replace=again)
    log.info("stored %s from %s in %s", known.name, where, directory)


def _search(
    known: KnownSet,
    directory: Path,
    offline: bool,
    source: Path | None,
    unverified: bool,
    parts: Parts,
    progress: Progress,
) -> tuple[Decoded, str, str]:
    """The set's content, where it came from and which edition it is."""

    def accept(decoded: Decoded) -> str:
        try:
            edition = known.verify(decoded)
        except DataError:
            if not unverified:
                raise
            decoded.check_shapes(len(known.classes))
            return "unverified"
        return edition.name if edition else "made here"

    if known.make is not None:
        decoded = known.make(parts)
        return decoded, "made by fedfa", accept(decoded)
    if source is not None:
        decoded = _from_source(known, source, parts)
        return decoded, f"files in {source.name}", accept(decoded)

    tried: list[str] = []
    for label, folder in _local_folders(known, directory):
        try:
            decoded = known.read(folder, parts)
            return decoded, label, accept(decoded)
        except NotHereError:
            tried.append(f"{label} ({folder}): not there")
        except DataError as error:
            log.warning("%s", error)
            tried.append(f"{label}: {error}")
    if offline:
        tried.append("network: not tried, because offline is set")
    else:
        for provider in known.providers:
            try:
                with tempfile.TemporaryDirectory(prefix="fedfa-") as workspace:
                    decoded = provider.obtain(known, Path(workspace), parts, progress)
                    return decoded, provider.label, accept(decoded)
            except (Unavailable, NotHereError, DataError) as error:
                log.info("%s: %s", provider.label, error)
                tried.append(f"{provider.label}: {error}")
    raise DataError(_advice(known, directory, tried))


def _local_folders(known: KnownSet, directory: Path) -> list[tuple[str, Path]]:
    """Folders on this machine to look in: files the user put into the data directory, then the system's copy."""
    names = (known.name, *known.folders)
    folders = [("data directory", directory)]
    folders += [("system copy", SYSTEM_COPIES / name) for name in names if (SYSTEM_COPIES / name).is_dir()]
    return [(label, folder) for label, folder in folders if folder.is_dir()]


def _from_source(known: KnownSet, source: Path, parts: Parts) -> Decoded:
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; --from names a folder that holds the files of {known.name}")
    try:
        return known.read(source, parts)
    except NotHereError as error:
        raise DataError(f"{source}: no files of {known.name} there; looked for {error}. {_files_wanted(known)}") from error


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
