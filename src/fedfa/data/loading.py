"""Find, download, verify, cache and open data sets."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedfa.arguments import checks_arguments
from fedfa.data import cache
from fedfa.data.definition import DataSetDefinition, FilesNotFoundError, Progress, Unavailable, no_progress
from fedfa.data.raw import RawDataSet
from fedfa.data.samples import Columns, DataOrigin, DataSet
from fedfa.data.sets import DEFINITIONS
from fedfa.data.user_data import from_path
from fedfa.error_messages import nearest
from fedfa.errors import DataError

log = logging.getLogger(__name__)

#: Folder of the files of Debian's data set packages.
SYSTEM_COPIES = Path("/usr/share/datasets")


@checks_arguments("fedfa.data.load")
def load(
    name: str,
    *,
    data_dir: Path | None = None,
    offline: bool = False,
    source: Path | None = None,
    again: bool = False,
    unverified: bool = False,
    columns: Columns = Columns(),  # noqa: B008 - frozen
    progress: Progress = no_progress,
) -> DataSet:
    """Load a data set by name, or the user's own from a path.

    The first call searches the data directory, the system's copies and the set's providers, verifies the content and
    converts it; later calls open it from the cache.

    Args:
        name: A name from :func:`known_names`, or the path of an ``.npz`` file, of a table (``.csv``, ``.parquet``) or
            of a folder of class folders.
        data_dir: Data directory; default: the environment variable ``FEDFA_DATA``, else ``~/.cache/fedfa``.
        offline: Make no network call.
        source: Read the set's files from this folder only.
        again: Obtain it anew even if it is cached.
        unverified: Accept unknown content; the manifest records it.
        columns: Which columns of a table are what.
        progress: Called during downloads.

    Raises:
        DataError: Not found, not obtainable or not the right content; lists what was tried and what to do.

    Example:
        >>> load("digits")
        <DataSet digits: 1,442 training + 355 test images of 8×8×1, 10 classes>
    """
    directory = cache.data_directory(data_dir)
    origin = DataOrigin(name, data_dir=None if data_dir is None else str(directory.absolute()))
    if name in DEFINITIONS:
        if given := columns.given():
            key, value = next(iter(given.items()))
            raise DataError(f"{key} = {value!r} names a column of your own table; {name} is a known data set")
        search = _Search(directory, offline, source, unverified, progress)
        return search.open(DEFINITIONS[name], again=again).with_origin(origin)
    path = Path(name).expanduser()
    if not path.exists():
        raise DataError(
            f"{name!r} is neither a known data set nor a path that exists{nearest(name, DEFINITIONS)}. Known are: "
            f"{', '.join(DEFINITIONS)}. "
            "A path names an .npz file, a table (.csv, .parquet) or a folder of class folders."
        )
    if source is not None:
        raise DataError(f"{name!r} is no known data set; your own file or folder is read directly, without --from")
    dataset = from_path(path.resolve(), directory, columns=columns, again=again)
    return dataset.with_origin(replace(origin, name=str(path.resolve()), columns=columns))


def known_names() -> tuple[str, ...]:
    """Names of the data sets that :func:`load` knows."""
    return tuple(DEFINITIONS)


@dataclass(frozen=True)
class _Search:
    """One call of :func:`load`: its arguments and the steps of the search."""

    directory: Path
    offline: bool
    source: Path | None
    unverified: bool
    progress: Progress
    is_component: bool = False

    def open(self, definition: DataSetDefinition, again: bool = False) -> DataSet:
        """Open from the cache; obtain it first where needed."""
        name = definition.name
        if again or not cache.is_cached(self.directory, name):
            with cache.locked_for(self.directory, name):
                # Another process may have stored it while this one waited for the lock.
                if again or not cache.is_cached(self.directory, name):
                    raw, where, edition = self._find(definition)
                    manifest = _manifest(definition, raw, where, edition)
                    cache.write(raw, name, self.directory, manifest, replace=again)
                    log.info("stored %s from %s in %s", name, where, self.directory)
        return cache.open_cached(self.directory, name)

    def _load_component(self, name: str) -> DataSet:
        """Load a set that the wanted one is built from; a given folder may hold it, but need not."""
        return replace(self, is_component=True).open(DEFINITIONS[name])

    def _find(self, definition: DataSetDefinition) -> tuple[RawDataSet, str, str]:
        """The set's content, its source and its edition."""
        read = partial(definition.read, load=self._load_component)
        if definition.make is not None:
            raw = definition.make(self._load_component)
            return raw, f"made here: {definition.made_of}", self._accept(definition, raw)
        if self.source is not None and not self.is_component:
            raw = self._from_source(definition, self.source)
            return raw, "files of the user", self._accept(definition, raw)
        tried: list[str] = []
        for label, folder in self._folders(definition):
            try:
                raw = read(folder)
                return raw, label, self._accept(definition, raw)
            except FilesNotFoundError:
                tried.append(f"{label} ({folder}): not there")
            except DataError as error:
                log.warning("%s", error)
                tried.append(f"{label}: {error}")
        if self.offline:
            tried.append("network: not tried, because offline is set")
        for provider in () if self.offline else definition.providers:
            try:
                with tempfile.TemporaryDirectory(prefix="fedfa-") as workspace:
                    raw = provider.obtain(Path(workspace), read, self.progress)
                    return raw, provider.label, self._accept(definition, raw)
            except (Unavailable, FilesNotFoundError, DataError) as error:
                log.info("%s: %s", provider.label, error)
                tried.append(f"{provider.label}: {error}")
        name = definition.name
        raise DataError(
            "\n  - ".join([f"{name} is not here and could not be obtained. Tried:", *tried])
            + f"\nWhat to do:\n  - put its files into {self.directory / name}, or run: "
            f"fedfa data get {name} --from FOLDER\n    {_files_needed(definition)}\n"
            f"  - they are described at {definition.homepage}"
        )

    def _from_source(self, definition: DataSetDefinition, source: Path) -> RawDataSet:
        if not source.is_dir():
            raise DataError(f"{source}: no such folder; --from names a folder with the files of {definition.name}")
        try:
            return definition.read(source, self._load_component)
        except FilesNotFoundError as error:
            raise DataError(
                f"{source}: no files of {definition.name} there; not found: {error}. {_files_needed(definition)}"
            ) from error

    def _folders(self, definition: DataSetDefinition) -> list[tuple[str, Path]]:
        """Local folders to search: a given one, the data directory, the system's copy."""
        folders = [] if self.source is None else [("the given folder", self.source)]
        folders.append(("data directory", self.directory))
        folders += [("system copy", SYSTEM_COPIES / name) for name in (definition.name, *definition.folders)]
        return [(label, folder) for label, folder in folders if folder.is_dir()]

    def _accept(self, definition: DataSetDefinition, raw: RawDataSet) -> str:
        """Name of the content's edition; raises where the content is unknown."""
        try:
            edition = definition.verify(raw)
        except DataError as error:
            # A generated set cannot be tampered with, but another version of a library may generate it differently.
            if not self.unverified and definition.make is None:
                raise
            log.warning("accepted although not the reference content: %s", error)
            raw.check_shapes(len(definition.classes))
            return "unverified"
        return edition.name if edition else "made here"


def _files_needed(definition: DataSetDefinition) -> str:
    return f"It is read from: {'; or '.join(reader.files for reader in definition.readers)}."


def _manifest(definition: DataSetDefinition, raw: RawDataSet, source: str, edition: str) -> dict[str, object]:
    numbers = len(definition.classes), len(definition.domains)
    return {
        "title": definition.title,
        "homepage": definition.homepage,
        "terms": definition.terms,
        "source": source,
        "edition": edition,
        "files": raw.files,
        "classes": list(definition.classes),
        "domains": list(definition.domains),
        "train": raw.train.counts(*numbers),
        "test": raw.test.counts(*numbers),
        **raw.notes,
    }
