"""Opening files whose bytes are not to be trusted."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedfa.errors import DataError

#: No file of any known set is larger when unpacked; more is a mistake or a trap.
_LARGEST = 6 << 30


def content(path: Path) -> bytes:
    """All bytes of a file, unpacked if it ends in ``.gz``.

    Raises:
        DataError: The file is truncated or damaged; the message names it.
    """
    with naming(path):
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            unpacked = file.read(_LARGEST)
            if len(unpacked) == _LARGEST:
                raise DataError(f"{path}: more than {_LARGEST >> 30} GiB when unpacked; not a data set known here")
            return unpacked


#: What reading a damaged file raises: gzip, numpy, JSON, PIL, zip and tar each have their own.
_DAMAGE = (
    OSError, ValueError, KeyError, IndexError, TypeError, SyntaxError, zlib.error, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn every way in which reading a damaged file can fail into an error that names the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except EOFError as error:
        raise DataError(f"{path}: truncated ({error})") from error
    except _DAMAGE as error:
        words = f"{type(error).__name__}: {error}"
        if "allow_pickle" in words:  # NumPy's advice, which is not ours
            words = "no arrays, or Python objects, which are not read because reading them could run a program"
        raise DataError(f"{path}: damaged or not of the expected format ({words})") from error


def check_md5(path: Path, expected: str) -> None:
    """Refuse a file whose MD5, as published with the data set, differs."""
    sum_ = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sum_.update(block)
    if sum_.hexdigest() != expected:
        raise DataError(
            f"{path}: its MD5 is {sum_.hexdigest()}, the published one is {expected}; it is truncated or changed"
        )


def tar_members(path: Path, wanted: dict[str, str]) -> dict[str, bytes]:
    """Files of a tar archive by base name, read into memory: nothing is written to paths that the archive chooses.

    Args:
        path: The archive, compressed or not.
        wanted: Base name in the archive to the key to return it under.
    """
    found: dict[str, bytes] = {}
    with naming(path), tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            if member.isfile() and name in wanted and member.size < _LARGEST:
                file = archive.extractfile(member)
                assert file is not None
                found[wanted[name]] = file.read()
    missing = [name for name, key in wanted.items() if key not in found]
    if missing:
        raise DataError(f"{path}: the archive lacks {', '.join(missing)}")
    return found


def zip_member(path: Path, ending: str) -> bytes:
    """The one file of a zip archive whose name ends so."""
    with naming(path), zipfile.ZipFile(path) as archive:
        for about in archive.infolist():
            if about.filename.endswith(ending) and about.file_size < _LARGEST:
                packed = archive.read(about)
                return gzip.GzipFile(fileobj=io.BytesIO(packed)).read() if ending.endswith(".gz") else packed
    raise DataError(f"{path}: the archive lacks a file that ends in {ending}")
