"""Digits of other origin: house numbers (SVHN), blended digits (MNIST-M), envelopes (USPS) and fonts (Chars74K)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, FileFinder, Reader
from fedfa.data.formats.arrays import read_label_and_values, read_libsvm, read_mat, read_npz
from fedfa.data.formats.pictures import read_mosaic, read_picture
from fedfa.data.formats.untrusted_files import content, reading
from fedfa.data.providers import HubDataset, WebFiles
from fedfa.data.raw import Array, RawDataSet, RawSamples
from fedfa.data.resize import resize
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES
from fedfa.errors import DataError

_SVHN_MD5 = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}


def _read_mats(finder: FileFinder) -> RawDataSet:
    paths = {part: finder.find(f"{part}_32x32.mat") for part in ("train", "test")}
    parts = {}
    for part, path in paths.items():
        loaded = read_mat(path, "X", "y")
        # MATLAB counts from one, so the digit 0 is stored as 10; the last axis counts the images.
        parts[part] = RawSamples(loaded["X"].transpose(3, 0, 1, 2), loaded["y"].ravel().astype(np.int64) % 10)
    files = {part: path.name for part, path in paths.items()}
    md5 = {paths[part]: md5 for part, md5 in _SVHN_MD5.items()}
    return RawDataSet(parts["train"], parts["test"], files, claims="complete", published_md5=md5)


def _read_mosaics(finder: FileFinder) -> RawDataSet:
    """Read the subsets: two pictures, each a grid of images, and their labels."""
    pictures = {"train": finder.find("train_15000.webp"), "test": finder.find("test_6000.webp")}
    path = pictures["train"].parent / "labels.npz"
    labels = read_npz(path, "y_train", "y_test")
    parts = {part: RawSamples(read_mosaic(picture), labels[f"y_{part}"]) for part, picture in pictures.items()}
    files = {part: picture.name for part, picture in pictures.items()}
    files |= {"train.labels": path.name, "test.labels": path.name}
    return RawDataSet(parts["train"], parts["test"], files, claims="subset")


_MOSAICS = Reader("{train_15000,test_6000}.webp with labels.npz", _read_mosaics)


def _read_mnist_m_folders(finder: FileFinder) -> RawDataSet:
    """Read Ganin's unpacked archive: for each part a folder of images and a text file of ``file label`` lines."""
    parts: dict[str, RawSamples] = {}
    files: dict[str, str] = {}
    for part in ("train", "test"):
        listing = finder.find(f"mnist_m/mnist_m_{part}_labels.txt", f"mnist_m_{part}_labels.txt")
        folder = finder.find_folder(f"mnist_m/mnist_m_{part}", f"mnist_m_{part}")
        parts[part] = RawSamples(*_listed(listing, folder))
        files |= {f"{part}.inputs": folder.name, f"{part}.labels": listing.name}
    return RawDataSet(parts["train"], parts["test"], files, claims="complete")


def _listed(listing: Path, folder: Path) -> tuple[Array, Array]:
    with reading(listing):
        rows = [line.split() for line in content(listing).decode().splitlines() if line.strip()]
        names, labels = [row[0] for row in rows], np.array([int(row[1]) for row in rows])
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise DataError(f"{listing}: names a file outside its folder: {outside[0]}")
    return np.stack([read_picture(folder / name) for name in names]), labels


SVHN = DataSetDefinition(
    name="svhn",
    title="SVHN: house numbers in street pictures, cropped to single digits",
    classes=DIGIT_NAMES,
    shape=(32, 32, 3),
    homepage="http://ufldl.stanford.edu/housenumbers",
    terms="non-commercial use only",
    editions=(
        Edition("complete", 73257, 26032, (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659)),
        Edition("subset", 15000, 6000, (970, 2789, 2233, 1732, 1538, 1391, 1174, 1128, 1052, 993), CHECKSUMS["svhn"]),
    ),
    readers=(
        Reader("{train,test}_32x32.mat", _read_mats),
        _MOSAICS,
    ),
    providers=(
        HubDataset("ufldl-stanford/svhn", "cropped_digits", mode="RGB"),
        WebFiles(
            "http://ufldl.stanford.edu/housenumbers/",
            tuple((f"{part}_32x32.mat", md5) for part, md5 in _SVHN_MD5.items()),
        ),
    ),
    folders=("SVHN",),
)

MNIST_M = DataSetDefinition(
    name="mnist-m",
    title="MNIST-M: MNIST's digits blended over patches of photographs",
    classes=DIGIT_NAMES,
    shape=(32, 32, 3),
    homepage="http://yaroslav.ganin.net",
    terms="backgrounds from BSDS500: research use",
    editions=(
        Edition("complete", 59001, 9001),
        Edition("subset", 15000, 6000, digests=CHECKSUMS["mnist-m"]),
    ),
    readers=(
        Reader("mnist_m/mnist_m_{train,test}/ with mnist_m_{train,test}_labels.txt", _read_mnist_m_folders),
        _MOSAICS,
    ),
    folders=("mnistm", "mnist_m", "MNIST-M"),
)


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
