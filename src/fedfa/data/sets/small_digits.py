"""USPS and the computer-font digits of Chars74K."""

from __future__ import annotations

import re

import numpy as np

from fedfa.data.decoded import Array, Arrays, Decoded
from fedfa.data.finding import Finder
from fedfa.data.formats.pictures import read_picture
from fedfa.data.formats.tables import read_label_and_values, read_libsvm, read_npz
from fedfa.data.known import Edition, KnownSet, Parts, Reader
from fedfa.data.providers import WebFiles
from fedfa.data.resize import resize
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES
from fedfa.errors import DataError


def _bytes_of(values: Array) -> Array:
    """Values in [-1, 1] to bytes."""
    return np.clip(np.rint((values.reshape(-1, 16, 16) + 1) * 127.5), 0, 255).astype(np.uint8)


def _read_usps_text(finder: Finder, parts: Parts) -> Decoded:
    paths = {part: finder.find(f"zip.{part}.gz", f"zip.{part}") for part in ("train", "test")}
    arrays = {}
    for part, path in paths.items():
        values, labels = read_label_and_values(path, 256)
        arrays[part] = Arrays(_bytes_of(values), labels)
    return _usps(arrays, {part: path.name for part, path in paths.items()})


def _read_usps_libsvm(finder: Finder, parts: Parts) -> Decoded:
    paths = {"train": finder.find("usps.bz2", "usps"), "test": finder.find("usps.t.bz2", "usps.t")}
    arrays = {}
    for part, path in paths.items():
        values, labels = read_libsvm(path, 256)
        arrays[part] = Arrays(_bytes_of(values), labels - 1)  # there the digit 0 is class 1
    return _usps(arrays, {part: path.name for part, path in paths.items()})


def _read_usps_npz(finder: Finder, parts: Parts) -> Decoded:
    path = finder.find("usps.npz")
    loaded = read_npz(path, "x_train", "y_train", "x_test", "y_test")
    arrays = {part: Arrays(loaded[f"x_{part}"], loaded[f"y_{part}"]) for part in ("train", "test")}
    return _usps(arrays, {"train": path.name, "test": path.name})


def _usps(arrays: dict[str, Arrays], names: dict[str, str]) -> Decoded:
    files = {f"{part}.{array}": name for part, name in names.items() for array in ("inputs", "labels")}
    return Decoded(arrays["train"], arrays["test"], files=files)


_USPS_COUNTS = (1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644)

USPS = KnownSet(
    name="usps",
    title="USPS: 9,298 digits from envelopes",
    classes=DIGIT_NAMES,
    shape=(16, 16, 1),
    homepage="https://hastie.su.domains/ElemStatLearn/data.html",
    terms="none stated",
    editions=(Edition("complete", 7291, 2007, _USPS_COUNTS, CHECKSUMS["usps"]),),
    readers=(
        Reader("zip.train.gz and zip.test.gz", _read_usps_text),
        Reader("usps.npz with x_train, y_train, x_test, y_test", _read_usps_npz),
        Reader("usps.bz2 and usps.t.bz2 (LIBSVM)", _read_usps_libsvm),
    ),
    providers=(
        WebFiles("https://hastie.su.domains/ElemStatLearn/datasets/", (("zip.train.gz", None), ("zip.test.gz", None))),
        WebFiles(
            "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/",
            (("usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197"), ("usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118")),
        ),
    ),
    folders=("USPS",),
)


def _read_chars_npz(finder: Finder, parts: Parts) -> Decoded:
    path = finder.find("chars74k_fnt_digits.npz")
    names = ("x_train", "y_train", "font_train", "x_test", "y_test", "font_test")
    loaded = read_npz(path, *names)
    arrays = [
        Arrays(loaded[f"x_{part}"], loaded[f"y_{part}"], writers=loaded[f"font_{part}"]) for part in ("train", "test")
    ]
    files = {f"{part}.{array}": path.name for part in ("train", "test") for array in ("inputs", "labels", "writers")}
    return Decoded(arrays[0], arrays[1], files=files, claims="28×28 arrays")


def _read_chars_folders(finder: Finder, parts: Parts) -> Decoded:
    """The official pictures: ``Fnt/Sample001`` is the digit 0, ``img001-00007.png`` is font style 7."""
    top = finder.find_folder("English/Fnt", "EnglishFnt/English/Fnt", "Fnt")
    images, labels, fonts = [], [], []
    for digit in range(10):
        folder = top / f"Sample{digit + 1:03d}"
        for path in sorted(folder.glob("img*-*.png")):
            style = re.fullmatch(r"img\d+-(\d+)\.png", path.name)
            if style is None:
                raise DataError(f"{path}: a name like img{digit + 1:03d}-00001.png is expected")
            images.append(resize(read_picture(path, "L")[None, :, :, None], 28, 28)[0])
            labels.append(digit)
            fonts.append(int(style[1]))
    if not images:
        raise DataError(f"{top}: no pictures Sample001/img001-00001.png … there")
    stacked, of, style_of = np.stack(images), np.array(labels), np.array(fonts)
    is_test = style_of % 5 == 0
    split = [Arrays(stacked[part], of[part], writers=style_of[part]) for part in (~is_test, is_test)]
    files = {f"{part}.{array}": "Fnt" for part in ("train", "test") for array in ("inputs", "labels", "writers")}
    return Decoded(split[0], split[1], files=files, claims="official pictures")


CHARS74K = KnownSet(
    name="chars74k-digits",
    title="Chars74K digits: 1,016 computer fonts × 10 digits, split by font",
    classes=DIGIT_NAMES,
    shape=(28, 28, 1),
    homepage="http://www.ee.surrey.ac.uk/CVSSP/demos/chars74k",
    terms="none stated; cite de Campos et al., Character Recognition in Natural Images (2009)",
    editions=(
        Edition("28×28 arrays", 8130, 2030, (813,) * 10, CHECKSUMS["chars74k-digits"]),
        Edition("official pictures", 8130, 2030, (813,) * 10),
    ),
    readers=(
        Reader("chars74k_fnt_digits.npz", _read_chars_npz),
        Reader("English/Fnt/Sample001…010/", _read_chars_folders),
    ),
    folders=("chars74k", "chars74k-fnt-digits", "Chars74K"),
)
