"""Arrays of numbers: IDX, .npz, MATLAB and text files."""

from __future__ import annotations

import bz2
import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from fedfa.data.formats.untrusted_files import content, reading
from fedfa.data.optional_imports import import_optional
from fedfa.data.raw import Array
from fedfa.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """Read an IDX file, gzipped or not, in the machine's byte order."""
    return parse_idx(content(path), str(path))


def parse_idx(data: bytes, name: str) -> Array:
    """Read IDX bytes; ``name`` is that of the file, for error messages."""
    if len(data) < 4 or data[0] or data[1] or data[2] not in _TYPES or not data[3]:
        raise DataError(f"{name}: not an IDX file (its first bytes are {data[:4].hex() or 'missing'})")
    dtype = np.dtype(_TYPES[data[2]])
    header = 4 + 4 * data[3]
    if len(data) < header:
        raise DataError(f"{name}: truncated inside its header")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", count=data[3], offset=4))
    expected = header + math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        state = "truncated" if len(data) < expected else "too long"
        raise DataError(f"{name}: {state}: {len(data):,} bytes instead of {expected:,}")
    values = np.frombuffer(data, dtype, offset=header).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def read_npz(path: Path, *wanted: str) -> dict[str, Array]:
    """Read named arrays of an ``.npz`` archive, or all of them; pickled objects are refused."""
    with reading(path), np.load(path, allow_pickle=False) as archive:
        _require(path, wanted, archive)
        return {name: archive[name] for name in wanted or archive}


def read_mat(path: Path, *wanted: str) -> dict[str, Array]:
    """Read named arrays of a MATLAB file."""
    io = import_optional("scipy.io", f"reading {path.name}")
    with reading(path):
        try:
            loaded = io.loadmat(path, variable_names=list(wanted))
        except Exception as error:  # scipy raises many kinds of errors for damaged files
            raise DataError(f"{path}: truncated or not a MATLAB file ({type(error).__name__}: {error})") from error
        _require(path, wanted, loaded)
        return {name: np.asarray(loaded[name]) for name in wanted}


def _require(path: Path, wanted: Collection[str], found: Collection[str]) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(f"{path}: lacks the array {', '.join(missing)}; it has {', '.join(found) or 'none'}")


def read_label_and_values(path: Path, values: int) -> tuple[Array, Array]:
    """Read rows of a label and ``values`` numbers, separated by blanks, as in the USPS files."""
    with reading(path):
        numbers = np.array(content(path).split(), dtype=np.float64)
        if len(numbers) % (values + 1):
            raise DataError(f"{path}: truncated: {len(numbers):,} numbers are not whole rows of {values + 1}")
        rows = numbers.reshape(-1, values + 1)
        return rows[:, 1:], rows[:, 0].astype(np.int64)


def read_libsvm(path: Path, values: int) -> tuple[Array, Array]:
    """Read rows of ``label index:value …``, compressed with bzip2 or not."""
    with reading(path):
        text = bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
        lines = text.decode("ascii").splitlines()
        rows, labels = np.zeros((len(lines), values)), np.empty(len(lines), dtype=np.int64)
        for number, line in enumerate(lines):
            label, *cells = line.split()
            labels[number] = int(float(label))
            for cell in cells:
                index, _, value = cell.partition(":")
                rows[number, int(index) - 1] = float(value)
        return rows, labels
