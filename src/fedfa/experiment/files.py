"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedfa.errors import RunError
from fedfa.learning.tensors import Tensors

_DIGEST = "content_blake2b"


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that at any moment it has the old content or the new, also after a crash."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    if os.name == "nt":  # directories cannot be flushed there
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of JSON lines. It outlives this process, but not yet the machine: see :func:`settle`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def settle(path: Path) -> None:
    """Flush what was appended to a file to the disk, before something that counts on it is written."""
    if not path.exists():
        return
    with path.open("rb+") as file:  # some systems flush only what is open for writing
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete record of a file of JSON lines, in order; one cut short by a crash is passed over."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is incomplete


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Named tensors as safetensors, atomically, with a checksum of their content."""
    plain = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    write_atomically(path, save(plain, metadata={_DIGEST: _digest(plain)}))


def load_tensors(path: Path) -> Tensors:
    """Read what :func:`save_tensors` wrote.

    Raises:
        RunError: The file is missing, cut short or changed.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            # Copied to where torch puts its own: a file's tensors lie at odd places, for which kernels may take other
            # paths.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no dict: it cannot be iterated over
            expected = (file.metadata() or {}).get(_DIGEST)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged ({error}); put back a copy, or start the run again elsewhere") from None
    if expected is not None and expected != _digest(tensors):
        raise RunError(f"{path} is damaged (its content does not match its checksum); put back a copy")
    return tensors


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
