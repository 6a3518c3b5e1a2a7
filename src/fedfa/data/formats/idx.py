"""IDX, the format of MNIST and its relatives: a header of big-endian numbers, then the values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fedfa.data.formats.untrusted_files import content
from fedfa.data.raw import Array
from fedfa.errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: Path) -> Array:
    """Read an IDX file, gzipped or not, in the machine's byte order."""
    return parse_idx(content(path), str(path))


def parse_idx(data: bytes, name: str) -> Array:
    """Read IDX bytes.

    Args:
        data: The bytes.
        name: Name of the file in error messages.
    """
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
