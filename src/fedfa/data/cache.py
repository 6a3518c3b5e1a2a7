"""Converted data sets on disk: one folder each, complete or absent, memory-mapped when opened.

A folder holds one ``.npy`` file per array, ``manifest.json`` and ``checked.json``. The latter notes size and time of
each array file when its checksum was last verified: an untouched file is trusted at once, any other is read again.
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

from fedfa.data.decoded import Array, Decoded, digest, digests, fingerprint
from fedfa.data.locks import locked
from fedfa.data.normalise import Normalisation
from fedfa.data.samples import DataSet, Samples
from fedfa.errors import DataError

log = logging.getLogger(__name__)

#: Part of the folder's name; raise it when the form on disk or a renderer changes.
FORM = 1
ENVIRONMENT_VARIABLE = "FEDFA_DATA"


def data_directory(given: Path | None = None) -> Path:
    """Where data is kept: what the caller says, else ``FEDFA_DATA``, else ``~/.cache/fedfa``."""
    if given is not None:
        return Path(given).expanduser()
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "fedfa"


def folder_of(directory: Path, name: str) -> Path:
    """The folder of a converted data set."""
    return directory / "sets" / f"{name}-v{FORM}"


@contextmanager
def locked_for(directory: Path, name: str) -> Iterator[None]:
    """Hold a data set's lock while it is obtained.

    Raises:
        DataError: Nothing can be kept there.
    """
    lock = directory / "sets" / f".{name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise DataError(
            f"{directory}: cannot keep data there ({error.strerror}); name another folder with --data-dir or "
            f"{ENVIRONMENT_VARIABLE}"
        ) from error
    with locked(lock):
        yield


def is_cached(directory: Path, name: str) -> bool:
    """Whether a converted copy is there (it is checked when opened)."""
    return (folder_of(directory, name) / "manifest.json").is_file()


def write(decoded: Decoded, name: str, directory: Path, manifest: Mapping[str, object], replace: bool = False) -> None:
    """Store a data set; it appears under its name whole or not at all."""
    target = folder_of(directory, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    aside = building.with_name(f"{building.name}.old")
    try:
        arrays: dict[str, object] = {}
        sums = digests(decoded)
        for array, values in decoded.named():
            with (building / f"{array}.npy").open("wb") as file:
                np.save(file, values, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            arrays[array] = {"dtype": str(values.dtype), "shape": list(values.shape), "sha256": sums[array]}
        shapes = {array: list(values.shape) for array, values in decoded.named()}
        complete = {
            **manifest,
            "name": name,
            "form": FORM,
            "fingerprint": fingerprint(sums, shapes),
            "normalisation": statistics(decoded.train.inputs),
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
            if aside.exists():  # better the old one than none
                aside.rename(target)
            if not (target / "manifest.json").is_file():
                raise
            log.debug("another process stored %s meanwhile", name)  # only without locks
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def open_cached(directory: Path, name: str) -> DataSet:
    """Open a stored data set: pages are mapped, shared with other processes and read when touched."""
    folder = folder_of(directory, name)
    manifest = _read_json(folder / "manifest.json")
    arrays = manifest["arrays"]
    _check(folder, arrays)
    mapped = {array: _map(folder / f"{array}.npy", about) for array, about in arrays.items()}

    def part(which: str) -> Samples:
        inputs, labels = mapped[f"{which}.inputs"], mapped[f"{which}.labels"]
        return Samples(inputs, labels, mapped.get(f"{which}.domains"), mapped.get(f"{which}.writers"))

    constants = manifest["normalisation"]
    return DataSet(
        name=name,
        train=part("train"),
        test=part("test"),
        classes=tuple(manifest["classes"]),
        domains=tuple(manifest.get("domains", ())),
        normalisation=Normalisation(tuple(constants["mean"]), tuple(constants["std"])),
        fingerprint=str(manifest["fingerprint"]),
        manifest=manifest,
    )


def remove(directory: Path, name: str) -> None:
    """Forget a stored data set."""
    shutil.rmtree(folder_of(directory, name), ignore_errors=True)


def statistics(inputs: Array) -> dict[str, list[float]]:
    """Mean and standard deviation per channel, exactly, from the counts of the 256 values; empty for other data."""
    if inputs.dtype != np.uint8:
        return {"mean": [], "std": []}
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(inputs.shape[-1]):
        counts = np.zeros(256, dtype=np.int64)
        for start in range(0, len(inputs), 4096):
            counts += np.bincount(inputs[start : start + 4096, ..., channel].ravel(), minlength=256)
        mean = float((counts * values).sum() / counts.sum())
        means.append(round(mean, 6))
        deviation = float(np.sqrt((counts * (values - mean) ** 2).sum() / counts.sum()))
        deviations.append(round(deviation, 6) or 1.0)  # a constant channel is only shifted
    return {"mean": means, "std": deviations}


def _map(path: Path, about: Mapping[str, object]) -> torch.Tensor:
    # Copy-on-write: torch accepts it as writable, a stray write stays private, and untouched pages stay shared.
    values = np.load(path, mmap_mode="c", allow_pickle=False)
    if str(values.dtype) != about["dtype"] or list(values.shape) != about["shape"]:
        raise DataError(f"{path}: holds {values.dtype} {list(values.shape)}, not what its manifest says; {_REPAIR}")
    return torch.from_numpy(values)


_REPAIR = "delete that folder, or get the set again with `fedfa data get NAME --again`"


def _check(folder: Path, arrays: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse array files that changed since they were verified, unless their content is still right."""
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
        except OSError:  # a cache that we may only read: check again next time
            log.debug("cannot note the check of %s", folder)


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
        raise DataError(f"{path}: not what it should be; {_REPAIR}")
    return content
