"""Files that are whole or absent, written beside their place, flushed and renamed; and digests that tell of changes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedfa.errors import RunError
from fedfa.learning.tensors import Tensors

_DIGEST = "content_blake2b"


@contextlib.contextmanager
def _full_disks_in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunError(
            f"the disk that holds {path.parent} is full: {path.name} was not written. What was saved before is whole; "
            "free some space and continue with --resume"
        ) from None


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that at any moment it has the old content or the new, also after a crash.

    Raises:
        RunError: The disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _full_disks_in_words(path), beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    if os.name == "nt":  # directories cannot be flushed there
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record to a file of JSON lines. It outlives this process, but not yet the machine: see :func:`settle`.

    Raises:
        RunError: The disk is full; the file is as before.
    """
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    with _full_disks_in_words(path), path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "no space left")
        except OSError:
            file.truncate(start)
            raise


def digest_of(data: bytes | str) -> str:
    """A short fingerprint of a file's content.

    Example:
        >>> digest_of("")
        'cae66941d9efbd404e4d88758ea67670'
    """
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=16).hexdigest()


def marks_of(files: Iterable[Path]) -> dict[str, str]:
    """Length and digest of each file as it is now, by its name; later lines may follow."""
    contents = {file.name: file.read_bytes() for file in files if file.exists()}
    return {name: f"{len(content)}:{digest_of(content)}" for name, content in contents.items()}


def check_marks(directory: Path, marks: str | dict[str, str]) -> None:
    """Refuse files that do not begin as they were.

    Raises:
        RunError: One was changed or cut.
    """
    try:
        for name, mark in (json.loads(marks) if isinstance(marks, str) else marks).items():
            length, digest = mark.split(":")
            path = directory / Path(name).name
            if not path.exists() or digest_of(path.read_bytes()[: int(length)]) != digest:
                raise RunError(f"{path} was changed or cut after it was recorded; put back a copy")
    except (ValueError, AttributeError) as error:
        raise RunError(f"the digests in {directory} are damaged ({error}); put back a copy") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a digest of itself."""
    digest = digest_of(json.dumps(content, sort_keys=True))
    write_atomically(path, json.dumps({**content, "digest": digest}, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read what :func:`write_json` wrote; of earlier releases' files, which have no digest, only the form is checked.

    Raises:
        RunError: It is no JSON object, or was changed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        digest = content.pop("digest", None)
        if digest is not None and digest != digest_of(json.dumps(content, sort_keys=True)):
            raise ValueError("its content does not match its digest")
    except (ValueError, RecursionError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise RunError(f"{path} is damaged ({error}); put back a copy") from None
    return content


def settle(path: Path) -> None:
    """Flush what was appended to a file to the disk, before something that counts on it is written."""
    if not path.exists():
        return
    with path.open("rb+") as file:  # some systems flush only what is open for writing
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete record of a file of JSON lines, in order; one cut short by a crash is passed over.

    Raises:
        RunError: A line is no JSON object.
    """
    if not path.exists():
        return []
    records = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is incomplete
            records.append(json.loads(line))
            if not isinstance(records[-1], dict) or type(records[-1].get("round")) is not int:
                raise ValueError(f"line {number} is no record of a round")
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); put back a copy") from None
    return records


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Named tensors as safetensors, atomically, with a checksum of their content, and notes."""
    plain = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    write_atomically(path, save(plain, metadata={_DIGEST: _digest(plain), **(notes or {})}))


def load_tensors(path: Path, only: str | None = None) -> Tensors:
    """Read what :func:`save_tensors` wrote; one tensor alone without the check of the whole.

    Raises:
        RunError: The file is missing, cut short or changed.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            # Copied to where torch puts its own: a file's tensors lie at odd places, for which kernels may take other
            # paths.
            names = [only] if only is not None else list(file.keys())
            tensors = {name: file.get_tensor(name).clone() for name in names}
            expected = (file.metadata() or {}).get(_DIGEST)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError) as error:  # a changed shape or dtype is a ValueError
        raise RunError(f"{path} is damaged ({error}); put back a copy, or start the run again elsewhere") from None
    if expected is not None and only is None and expected != _digest(tensors):
        raise RunError(f"{path} is damaged (its content does not match its checksum); put back a copy")
    return tensors


def read_notes(path: Path) -> dict[str, str]:
    """The notes of a file of tensors.

    Raises:
        RunError: The file is damaged.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); put back a copy, or start the run again elsewhere") from None


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()
