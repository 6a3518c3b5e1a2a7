"""Reading of files whose content is not trusted."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedfa.errors import DataError

#: Limit of the unpacked size, larger than any file of a known set, against decompression bombs.
_LARGEST = 6 << 30


def content(path: Path) -> bytes:
    """The bytes of a file, decompressed if its name ends in ``.gz``.

    Raises:
        DataError: The file is truncated or damaged; the message names it.
    """
    with reading(path):
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            unpacked = file.read(_LARGEST)
            if len(unpacked) == _LARGEST:
                raise DataError(f"{path}: more than {_LARGEST >> 30} GiB when unpacked; no known set is that large")
            return unpacked


#: Errors of gzip, numpy, JSON, PIL, zip and tar for damaged files.
_DAMAGE = (
    OSError, ValueError, KeyError, IndexError, TypeError, SyntaxError, zlib.error, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert any error of reading a damaged file to a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except EOFError as error:
        raise DataError(f"{path}: truncated ({error})") from error
    except _DAMAGE as error:
        reason = f"{type(error).__name__}: {error}"
        if "allow_pickle" in reason:  # do not repeat NumPy's advice to unpickle
            reason = "no arrays, or Python objects, which are not read because reading them could run a program"
        raise DataError(f"{path}: damaged or not of the expected format ({reason})") from error


def check_md5(path: Path, expected: str) -> None:
    """Refuse a file whose MD5, as published with the data set, differs."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != expected:
        raise DataError(f"{path}: its MD5 is {found}, the published one is {expected}; it is truncated or changed")


def tar_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Files of a tar archive by base name, read into memory: nothing is written to paths that the archive chooses."""
    found: dict[str, bytes] = {}
    with reading(path), tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            if member.isfile() and name in wanted and member.size < _LARGEST:
                file = archive.extractfile(member)
                assert file is not None
                found[name] = file.read()
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(f"{path}: the archive lacks {', '.join(missing)}")
    return found


def zip_member(path: Path, ending: str) -> bytes:
    """The first file of a zip archive whose name has this ending, decompressed if that is ``.gz``."""
    with reading(path), zipfile.ZipFile(path) as archive:
        for about in archive.infolist():
            if about.filename.endswith(ending) and about.file_size < _LARGEST:
                packed = archive.read(about)
                return gzip.GzipFile(fileobj=io.BytesIO(packed)).read() if ending.endswith(".gz") else packed
    raise DataError(f"{path}: the archive lacks a file that ends in {ending}")
