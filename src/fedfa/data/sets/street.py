"""SVHN and MNIST-M: colour digits of 32×32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedfa.data.decoded import Array, Arrays, Decoded
from fedfa.data.finding import Finder
from fedfa.data.formats.files import content, naming
from fedfa.data.formats.pictures import read_mosaic, read_picture
from fedfa.data.formats.tables import read_mat, read_npz
from fedfa.data.known import Edition, KnownSet, Parts, Reader
from fedfa.data.providers import HubDataset, WebFiles
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES
from fedfa.errors import DataError


def _read_mats(finder: Finder, parts: Parts) -> Decoded:
    paths = {part: finder.find(f"{part}_32x32.mat") for part in ("train", "test")}
    arrays = {}
    for part, path in paths.items():
        loaded = read_mat(path, "X", "y")
        # MATLAB counts from one, so the digit 0 is stored as 10; the last axis counts the images.
        arrays[part] = Arrays(loaded["X"].transpose(3, 0, 1, 2), loaded["y"].ravel().astype(np.int64) % 10)
    return Decoded(
        arrays["train"],
        arrays["test"],
        files={f"{part}.{array}": path.name for part, path in paths.items() for array in ("inputs", "labels")},
        claims="complete",
        published_md5={paths[part]: md5 for part, md5 in _SVHN_MD5.items()},
    )


_SVHN_MD5 = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}


def _read_mosaics(train: int, test: int) -> Callable[[Finder, Parts], Decoded]:
    """A reader of two pictures, each a grid of images, and their labels."""

    def read(finder: Finder, parts: Parts) -> Decoded:
        pictures = {"train": finder.find(f"train_{train}.webp"), "test": finder.find(f"test_{test}.webp")}
        labels_path = pictures["train"].parent / "labels.npz"
        labels = read_npz(labels_path, "y_train", "y_test")
        return Decoded(
            Arrays(read_mosaic(pictures["train"]), labels["y_train"]),
            Arrays(read_mosaic(pictures["test"]), labels["y_test"]),
            files={
                "train.inputs": pictures["train"].name,
                "test.inputs": pictures["test"].name,
                "train.labels": labels_path.name,
                "test.labels": labels_path.name,
            },
            claims="subset",
        )

    return read


def _read_mnist_m_folders(finder: Finder, parts: Parts) -> Decoded:
    """Ganin's archive, unpacked: a folder of pictures and a text of ``file label`` lines for each part."""
    arrays: dict[str, Arrays] = {}
    files: dict[str, str] = {}
    for part in ("train", "test"):
        listing = finder.find(f"mnist_m/mnist_m_{part}_labels.txt", f"mnist_m_{part}_labels.txt")
        folder = finder.find_folder(f"mnist_m/mnist_m_{part}", f"mnist_m_{part}")
        images, labels = _listed(listing, folder)
        arrays[part] = Arrays(images, labels)
        files |= {f"{part}.inputs": folder.name, f"{part}.labels": listing.name}
    return Decoded(arrays["train"], arrays["test"], files=files, claims="complete")


def _listed(listing: Path, folder: Path) -> tuple[Array, Array]:
    with naming(listing):
        rows = [line.split() for line in content(listing).decode().splitlines() if line.strip()]
        names, labels = [row[0] for row in rows], np.array([int(row[1]) for row in rows])
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise DataError(f"{listing}: names a file outside its folder: {outside[0]}")
    return np.stack([read_picture(folder / name) for name in names]), labels


SVHN = KnownSet(
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
        Reader("{train_15000,test_6000}.webp with labels.npz", _read_mosaics(15000, 6000)),
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

MNIST_M = KnownSet(
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
        Reader("{train_15000,test_6000}.webp with labels.npz", _read_mosaics(15000, 6000)),
    ),
    folders=("mnistm", "mnist_m", "MNIST-M"),
)
