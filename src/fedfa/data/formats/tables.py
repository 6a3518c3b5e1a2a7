"""Numbers in text files and in MATLAB files, and arrays in ``.npz`` archives."""

from __future__ import annotations

import bz2
from pathlib import Path

import numpy as np

from fedfa.data.decoded import Array
from fedfa.data.formats.files import content, naming
from fedfa.data.optional import needs
from fedfa.errors import DataError


def read_npz(path: Path, *wanted: str) -> dict[str, Array]:
    """Read named arrays of an ``.npz`` archive; pickled objects in it are refused."""
    with naming(path), np.load(path, allow_pickle=False) as archive:
        missing = [name for name in wanted if name not in archive]
        if missing:
            raise DataError(f"{path}: lacks the array {', '.join(missing)}; it has {', '.join(archive) or 'none'}")
        return {name: archive[name] for name in wanted}


def read_npz_all(path: Path) -> dict[str, Array]:
    """Read every array of an ``.npz`` archive; pickled objects in it are refused."""
    with naming(path), np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive}


def read_label_and_values(path: Path, values: int) -> tuple[Array, Array]:
    """Read rows of a label and so many numbers, separated by blanks, as in the USPS files."""
    with naming(path):
        numbers = np.array(content(path).split(), dtype=np.float64)
        if len(numbers) % (values + 1):
            raise DataError(f"{path}: truncated: {len(numbers):,} numbers are not whole rows of {values + 1}")
        rows = numbers.reshape(-1, values + 1)
        return rows[:, 1:], rows[:, 0].astype(np.int64)


def read_libsvm(path: Path, values: int) -> tuple[Array, Array]:
    """Read rows of ``label index:value …``, packed with bzip2 or not."""
    with naming(path):
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


def read_mat(path: Path, *wanted: str) -> dict[str, Array]:
    """Read named arrays of a MATLAB file."""
    io = needs("scipy.io", f"reading {path.name}")
    with naming(path):
        try:
            content_ = io.loadmat(path, variable_names=list(wanted))
        except Exception as error:  # scipy has errors of its own for each way of being damaged
            raise DataError(f"{path}: truncated or not a MATLAB file ({type(error).__name__}: {error})") from error
        missing = [name for name in wanted if name not in content_]
        if missing:
            raise DataError(f"{path}: lacks the array {', '.join(missing)}")
        return {name: np.asarray(content_[name]) for name in wanted}
