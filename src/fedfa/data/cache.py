"""Cache of converted data sets: one folder each, complete or absent, memory-mapped when opened.

A folder holds one ``.npy`` file per array, ``manifest.json`` and ``checked.json``. The latter records size and time of
each array file when its checksum was last verified: an unchanged file is trusted, any other is verified again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfa.data.preprocessing import Normalisation
from fedfa.data.raw import Array, RawDataSet, digest
from fedfa.data.samples import DataSet, Samples
from fedfa.errors import DataError

log = logging.getLogger(__name__)

#: Version in the folder's name; increase it when the format on disk or a renderer changes.
FORM = 1
ENVIRONMENT_VARIABLE = "FEDFA_DATA"


def data_directory(given: Path | None = None) -> Path:
    """The given data directory, else ``FEDFA_DATA``, else ``~/.cache/fedfa``."""
    if given is not None:
        return Path(given).expanduser()
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "fedfa"


def folder_of(directory: Path, name: str) -> Path:
    """The folder of a converted data set."""
    return directory / "sets" / f"{name}-v{FORM}"


@contextmanager
def locked_for(directory: Path, name: str) -> Iterator[None]:
    """Hold a data set's lock, so that no two processes convert it at once.

    Raises:
        DataError: The directory cannot be written.
    """
    from filelock import FileLock, Timeout  # here, because it loads asyncio, which opening a cached set does not need

    path = directory / "sets" / f".{name}.lock"
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("waiting for another process that holds %s", path)
            lock.acquire()
    except OSError as error:
        raise DataError(
            f"{directory}: cannot store data there ({error.strerror}); name another folder with --data-dir or "
            f"{ENVIRONMENT_VARIABLE}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def is_cached(directory: Path, name: str) -> bool:
    """Whether a converted copy exists; it is verified when opened."""
    return (folder_of(directory, name) / "manifest.json").is_file()


def write(raw: RawDataSet, name: str, directory: Path, manifest: Mapping[str, object], replace: bool = False) -> None:
    """Store a data set under its name, completely or not at all."""
    target = folder_of(directory, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    aside = building.with_name(f"{building.name}.old")
    try:
        arrays: dict[str, object] = {}
        digests = raw.digests()
        for array, values in raw.named():
            with (building / f"{array}.npy").open("wb") as file:
                np.save(file, values, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            arrays[array] = {"dtype": str(values.dtype), "shape": list(values.shape), "sha256": digests[array]}
        complete = {
            **manifest,
            "name": name,
            "form": FORM,
            "fingerprint": raw.fingerprint(digests),
            "normalisation": manifest.get("normalisation") or statistics(raw.train.inputs).to_dict(),
            "arrays": arrays,
        }
        _write_json(building / "manifest.json", complete)
        _write_json(building / "checked.json", _stamps(building, list(arrays)))
        building.chmod(0o755)
        if replace and target.exists():
            target.rename(aside)
        try:
            building.rename(target)
        except OSError:
            if aside.exists():  # restore the old copy
                aside.rename(target)
            if not (target / "manifest.json").is_file():
                raise
            log.debug("another process stored %s first", name)  # file systems without locks
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def open_cached(directory: Path, name: str) -> DataSet:
    """Open a stored data set. It is memory-mapped: pages are read on access and shared between processes."""
    folder = folder_of(directory, name)
    manifest = _read_json(folder / "manifest.json")
    arrays = manifest["arrays"]
    _check(folder, arrays)
    mapped = {array: _map(folder / f"{array}.npy", about) for array, about in arrays.items()}

    def samples(part: str) -> Samples:
        inputs, labels = mapped[f"{part}.inputs"], mapped[f"{part}.labels"]
        return Samples(inputs, labels, mapped.get(f"{part}.domains"), mapped.get(f"{part}.writers"))

    return DataSet(
        name=name,
        train=samples("train"),
        test=samples("test"),
        validation=samples("validation") if "validation.inputs" in mapped else None,
        owners=tuple(manifest.get("owners", ())),
        classes=tuple(manifest["classes"]),
        domains=tuple(manifest.get("domains", ())),
        normalisation=Normalisation.from_dict(manifest["normalisation"]),
        fingerprint=str(manifest["fingerprint"]),
        manifest=manifest,
    )


def statistics(inputs: Array) -> Normalisation:
    """Mean and standard deviation per channel of images, exactly, from counts of the values; empty for other data."""
    if inputs.dtype not in (np.uint8, np.uint16):
        return Normalisation()
    peak = int(np.iinfo(inputs.dtype).max)
    values = np.arange(peak + 1) / peak
    digits = 6 if peak == 255 else 12  # 16-bit images often use a small part of their range
    means, deviations = [], []
    for channel in range(inputs.shape[-1]):
        counts = np.zeros(peak + 1, dtype=np.int64)
        for start in range(0, len(inputs), 4096):
            counts += np.bincount(inputs[start : start + 4096, ..., channel].ravel(), minlength=peak + 1)
        mean = float((counts * values).sum() / counts.sum())
        means.append(round(mean, digits))
        deviation = float(np.sqrt((counts * (values - mean) ** 2).sum() / counts.sum()))
        deviations.append(round(deviation, digits) or 1.0)  # a constant channel is only shifted
    return Normalisation(tuple(means), tuple(deviations))


def _map(path: Path, about: Mapping[str, object]) -> torch.Tensor:
    # Copy-on-write: torch requires a writable array, an accidental write stays private, other pages stay shared.
    values = np.load(path, mmap_mode="c", allow_pickle=False)
    if str(values.dtype) != about["dtype"] or list(values.shape) != about["shape"]:
        raise DataError(f"{path}: holds {values.dtype} {list(values.shape)}, unlike its manifest; {_REPAIR}")
    return torch.from_numpy(values)


_REPAIR = "delete that folder, or get the set again with `fedfa data get NAME --again`"


def _check(folder: Path, arrays: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse array files that changed since they were verified, unless their checksum is still right."""
    try:
        known = _read_json(folder / "checked.json")
        now = _stamps(folder, list(arrays))
    except FileNotFoundError as error:
        raise DataError(f"{error.filename}: missing from the cache; {_REPAIR}") from error
    changed = [array for array in arrays if known.get(array) != now[array]]
    for array in changed:
        path = folder / f"{array}.npy"
        try:
            right = digest(np.load(path, mmap_mode="r", allow_pickle=False)) == arrays[array]["sha256"]
        except (ValueError, OSError, EOFError):
            right = False
        if not right:
            raise DataError(f"{path}: truncated or changed since it was stored (checksum differs); {_REPAIR}")
    if changed:
        try:
            _write_json(folder / "checked.json", now)
        except OSError:  # a read-only cache: verify again next time
            log.debug("cannot record the verification of %s", folder)


def _stamps(folder: Path, arrays: list[str]) -> dict[str, object]:
    stamps: dict[str, object] = {}
    for array in arrays:
        about = (folder / f"{array}.npy").stat()
        stamps[array] = [about.st_size, about.st_mtime_ns]
    return stamps


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not readable as JSON; {_REPAIR}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object; {_REPAIR}")
    return content
