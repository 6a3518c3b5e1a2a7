"""CIFAR in its official binary and Python versions, and as sheets of pixels."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedfa.data.formats.pictures import read_picture
from fedfa.data.formats.untrusted_files import content, reading
from fedfa.data.raw import Array
from fedfa.errors import DataError

_PIXELS = 3 * 32 * 32


def parse_binary(data: bytes, name: str, label_bytes: int) -> tuple[Array, Array]:
    """Read images ``[N, 32, 32, 3]`` and labels from records of label bytes and 3,072 pixel bytes, channel by channel.

    CIFAR-10 has one label byte, CIFAR-100 two, of which the second is the fine label.
    """
    record = label_bytes + _PIXELS
    if not data or len(data) % record:
        raise DataError(f"{name}: truncated or not CIFAR: {len(data):,} bytes are not whole records of {record:,}")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    return _planes_to_images(records[:, label_bytes:]), records[:, label_bytes - 1].astype(np.int64)


def parse_python(data: bytes, name: str, labels: bytes) -> tuple[Array, Array]:
    """Read the Python version, a pickle in which only arrays, strings and numbers are allowed.

    The key of the labels is ``b"labels"`` or ``b"fine_labels"``.
    """
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
        pixels, numbers = np.asarray(batch[b"data"]), np.asarray(batch[labels], dtype=np.int64)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{name}: truncated or not a CIFAR batch ({type(error).__name__}: {error})") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(numbers), _PIXELS):
        raise DataError(f"{name}: pixels are {pixels.dtype} {list(pixels.shape)}, not uint8 {[len(numbers), _PIXELS]}")
    return _planes_to_images(pixels), numbers


def read_sheet(path: Path) -> Array:
    """Read a picture in which every row is one 32×32 image, pixel after pixel."""
    pixels = read_picture(path)
    if pixels.ndim != 3 or pixels.shape[1:] != (1024, 3):
        raise DataError(f"{path}: a sheet of 1,024 pixels by N is expected, not {list(pixels.shape)}")
    return pixels.reshape(-1, 32, 32, 3)


def read_json_labels(path: Path) -> Array:
    """Read a JSON list of numbers."""
    with reading(path):
        return np.asarray(json.loads(content(path)), dtype=np.int64)


def _planes_to_images(pixels: Array) -> Array:
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _reconstruct(kind: type, shape: tuple[int, ...], code: str | bytes) -> Array:
    """Replacement of NumPy's function of that name, which makes an empty array for the state to fill."""
    return np.empty(shape, code.decode() if isinstance(code, bytes) else code)


def _encode(text: str, encoding: str) -> bytes:
    """Replacement of ``_codecs.encode``, which Python 3 uses to write bytes into old pickles."""
    if encoding != "latin1":
        raise DataError(f"refused: the pickle uses the encoding {encoding}")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that can call nothing but the constructors of NumPy arrays."""

    _allowed: dict[tuple[str, str], Callable[..., Any]] = {
        (module, name): thing
        for module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
        for name, thing in (("ndarray", np.ndarray), ("dtype", np.dtype), ("_reconstruct", _reconstruct))
    } | {("_codecs", "encode"): _encode}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise DataError(
                f"refused: the pickle uses {module}.{name}, which no CIFAR batch needs; use the binary version"
            ) from None
