"""USPS and the computer-font digits of Chars74K."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, FileFinder, Reader
from fedfa.data.formats.arrays import read_label_and_values, read_libsvm, read_npz
from fedfa.data.formats.pictures import read_picture
from fedfa.data.providers import WebFiles
from fedfa.data.raw import Array, RawDataSet, RawSamples
from fedfa.data.resize import resize
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES
from fedfa.errors import DataError


def _read_usps_text(finder: FileFinder) -> RawDataSet:
    paths = [finder.find(f"zip.{part}.gz", f"zip.{part}") for part in ("train", "test")]
    return _usps([(*read_label_and_values(path, 256), path) for path in paths])


def _read_usps_libsvm(finder: FileFinder) -> RawDataSet:
    paths = [finder.find("usps.bz2", "usps"), finder.find("usps.t.bz2", "usps.t")]
    parts = [(*read_libsvm(path, 256), path) for path in paths]
    return _usps([(values, labels - 1, path) for values, labels, path in parts])  # there the digit 0 is class 1


def _usps(parts: list[tuple[Array, Array, Path]]) -> RawDataSet:
    """Samples with values in [-1, 1] as bytes."""
    samples = [
        RawSamples(np.clip(np.rint((values.reshape(-1, 16, 16) + 1) * 127.5), 0, 255).astype(np.uint8), labels)
        for values, labels, _ in parts
    ]
    return RawDataSet(samples[0], samples[1], {"train": parts[0][2].name, "test": parts[1][2].name})


def _read_usps_npz(finder: FileFinder) -> RawDataSet:
    path = finder.find("usps.npz")
    loaded = read_npz(path, "x_train", "y_train", "x_test", "y_test")
    train, test = (RawSamples(loaded[f"x_{part}"], loaded[f"y_{part}"]) for part in ("train", "test"))
    return RawDataSet(train, test, {"train": path.name, "test": path.name})


_USPS_COUNTS = (1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644)

USPS = DataSetDefinition(
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


def _read_chars_npz(finder: FileFinder) -> RawDataSet:
    path = finder.find("chars74k_fnt_digits.npz")
    loaded = read_npz(path, "x_train", "y_train", "font_train", "x_test", "y_test", "font_test")
    train, test = (
        RawSamples(loaded[f"x_{part}"], loaded[f"y_{part}"], writers=loaded[f"font_{part}"])
        for part in ("train", "test")
    )
    return RawDataSet(train, test, {"train": path.name, "test": path.name}, claims="28×28 arrays")


def _read_chars_folders(finder: FileFinder) -> RawDataSet:
    """Read the official images: ``Fnt/Sample001`` is the digit 0, ``img001-00007.png`` is font style 7."""
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
        raise DataError(f"{top}: lacks the images Sample001/img001-00001.png …")
    samples = RawSamples(np.stack(images), np.array(labels), writers=np.array(fonts))
    is_test = np.array(fonts) % 5 == 0
    files = {"train": "Fnt", "test": "Fnt"}
    return RawDataSet(samples.select(~is_test), samples.select(is_test), files, claims="official pictures")


CHARS74K = DataSetDefinition(
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
