"""Small files in the official formats, and the folder of real ones, where there is one."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def real_files() -> Path:
    """The folder with real files of the sets that have no package; skips the test without one."""
    folder = Path(os.environ.get("FEDFA_TEST_DATA", "does not exist"))
    if not (folder / "usps").is_dir():
        pytest.skip("no folder with real data files: set FEDFA_TEST_DATA to one that holds usps/, svhn/ and so on")
    return folder


def idx_bytes(values: np.ndarray[Any, Any]) -> bytes:
    codes = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}
    header = bytes([0, 0, codes[values.dtype.name], values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return header + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = idx_bytes(values)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def write_mnist(folder: Path, train: int = 40, test: int = 20, seed: int = 1, ending: str = ".gz") -> None:
    """Four IDX files with random pictures."""
    rng = np.random.default_rng(seed)
    for prefix, count in (("train", train), ("t10k", test)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte{ending}", rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{ending}", (np.arange(count) % 10).astype(np.uint8))
