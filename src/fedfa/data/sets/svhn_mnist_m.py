"""SVHN and MNIST-M: colour digits of 32×32 pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, FileFinder, Reader
from fedfa.data.formats.arrays import read_mat, read_npz
from fedfa.data.formats.pictures import read_mosaic, read_picture
from fedfa.data.formats.untrusted_files import content, reading
from fedfa.data.providers import HubDataset, WebFiles
from fedfa.data.raw import Array, RawDataSet, RawSamples
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
