"""Handwriting with known writers: MNIST with NIST's writer ids, EMNIST's digits and federated EMNIST."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedfa.data.decoded import Array, Arrays, Decoded
from fedfa.data.finding import Finder
from fedfa.data.formats.files import zip_member
from fedfa.data.formats.idx import parse_idx, read_idx
from fedfa.data.formats.writers import read_leaf, read_tff
from fedfa.data.known import Edition, KnownSet, Parts, Reader
from fedfa.data.providers import WebFiles
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.data.sets.mnist import DIGIT_NAMES, MNIST_COUNTS
from fedfa.errors import DataError

_QMNIST_LABEL, _QMNIST_WRITER = 0, 2  # columns of the QMNIST label files


def _read_mnist_writers(finder: Finder, parts: Parts) -> Decoded:
    paths = {
        part: finder.find(f"qmnist-{part}-labels-idx2-int.gz", f"qmnist-{part}-labels-idx2-int")
        for part in ("train", "test")
    }
    mnist = parts("mnist")
    arrays, files = {}, {}
    for part, samples in (("train", mnist.train), ("test", mnist.test)):
        table = read_idx(paths[part])
        labels = samples.labels.numpy()
        if table.ndim != 2 or table.shape[1] != 8 or len(table) < len(labels):
            raise DataError(f"{paths[part]}: a table of 8 columns and {len(labels):,} rows or more is expected")
        table = table[: len(labels)]  # the test file goes on with the digits that MNIST left out
        if not np.array_equal(table[:, _QMNIST_LABEL], labels):
            raise DataError(f"{paths[part]}: its labels are not MNIST's, so its writers cannot be MNIST's either")
        arrays[part] = Arrays(samples.inputs.numpy(), labels, writers=table[:, _QMNIST_WRITER])
        files[f"{part}.writers"] = paths[part].name
        files |= {f"{part}.inputs": "mnist", f"{part}.labels": "mnist"}
    return Decoded(arrays["train"], arrays["test"], files=files)


MNIST_WRITERS = KnownSet(
    name="mnist-writers",
    title="MNIST with the writer of every digit: 539 training writers",
    classes=DIGIT_NAMES,
    shape=(28, 28, 1),
    homepage="https://github.com/facebookresearch/qmnist",
    terms="writer ids (QMNIST): BSD licence; digits: as for mnist",
    editions=(Edition("complete", 60000, 10000, MNIST_COUNTS, CHECKSUMS["mnist-writers"]),),
    readers=(Reader("qmnist-{train,test}-labels-idx2-int.gz (and mnist)", _read_mnist_writers),),
    providers=(
        WebFiles(
            "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
            (("qmnist-train-labels-idx2-int.gz", None), ("qmnist-test-labels-idx2-int.gz", None)),
        ),
    ),
    folders=("qmnist", "QMNIST"),
)

_EMNIST_ZIP_MD5 = "58c8d27c78d21e728a6bc7b3cc06412e"


def _read_emnist_digits(finder: Finder, parts: Parts) -> Decoded:
    arrays, files = {}, {}
    for part in ("train", "test"):
        loaded = {}
        for array, ending in (("inputs", "images-idx3-ubyte"), ("labels", "labels-idx1-ubyte")):
            path = finder.find(f"emnist-digits-{part}-{ending}.gz", f"emnist-digits-{part}-{ending}")
            loaded[array], files[f"{part}.{array}"] = read_idx(path), path.name
        arrays[part] = _upright(loaded["inputs"], loaded["labels"])
    return Decoded(arrays["train"], arrays["test"], files=files)


def _read_emnist_zip(finder: Finder, parts: Parts) -> Decoded:
    path = finder.find("gzip.zip", "emnist-gzip.zip", "emnist.zip")
    arrays: dict[str, Arrays] = {}
    files: dict[str, str] = {}
    for part in ("train", "test"):
        members = (f"emnist-digits-{part}-images-idx3-ubyte.gz", f"emnist-digits-{part}-labels-idx1-ubyte.gz")
        images, labels = (parse_idx(zip_member(path, name), f"{path}:{name}") for name in members)
        arrays[part] = _upright(images, labels)
        files |= {f"{part}.inputs": f"{path.name}:{members[0]}", f"{part}.labels": f"{path.name}:{members[1]}"}
    return Decoded(arrays["train"], arrays["test"], files=files, published_md5={path: _EMNIST_ZIP_MD5})


def _upright(images: Array, labels: Array) -> Arrays:
    """EMNIST stores its pictures column by column."""
    if images.ndim != 3:
        raise DataError(f"EMNIST images have three axes, not {images.ndim}")
    return Arrays(images.transpose(0, 2, 1), labels)


EMNIST_DIGITS = KnownSet(
    name="emnist-digits",
    title="EMNIST digits: 280,000 handwritten digits, 28,000 of each",
    classes=DIGIT_NAMES,
    shape=(28, 28, 1),
    homepage="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    terms="public domain (NIST, US government); cite Cohen et al., EMNIST (2017)",
    editions=(Edition("complete", 240000, 40000, (24000,) * 10),),
    readers=(
        Reader("emnist-digits-{train,test}-{images-idx3,labels-idx1}-ubyte, gzipped or not", _read_emnist_digits),
        Reader("gzip.zip (the official archive)", _read_emnist_zip),
    ),
    providers=(WebFiles("https://biometrics.nist.gov/cs_links/EMNIST/", (("gzip.zip", _EMNIST_ZIP_MD5),)),),
    folders=("EMNIST", "emnist"),
)

_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
Samples = tuple[Arrays, list[str]]


def _read_hdf5(stem: str) -> Callable[[Finder, Parts], Decoded]:
    def read(finder: Finder, parts: Parts) -> Decoded:
        paths = {part: finder.find(f"{stem}_{part}.h5") for part in ("train", "test")}
        return _one_numbering(read_tff(paths["train"]), read_tff(paths["test"]), paths, "TensorFlow Federated")

    return read


def _read_leaf_folders(only_digits: bool) -> Callable[[Finder, Parts], Decoded]:
    def read(finder: Finder, parts: Parts) -> Decoded:
        folders = {part: finder.find_folder(f"data/{part}", part) for part in ("train", "test")}
        shares = [read_leaf(sorted(folder.glob("*.json"))) for folder in folders.values()]
        if only_digits:
            shares = [(_digits_of(arrays), names) for arrays, names in shares]
        return _one_numbering(shares[0], shares[1], folders, "LEAF")

    return read


def _digits_of(arrays: Arrays) -> Arrays:
    keep = arrays.labels < 10
    assert arrays.writers is not None
    return Arrays(arrays.inputs[keep], arrays.labels[keep], writers=arrays.writers[keep])


def _one_numbering(train: Samples, test: Samples, paths: dict[str, Path], claims: str) -> Decoded:
    """Number the writers alike in both parts, in the order of their names."""
    names = sorted({*train[1], *test[1]})
    number = {name: position for position, name in enumerate(names)}
    for arrays, own in (train, test):
        assert arrays.writers is not None
        arrays.writers = np.array([number[name] for name in own], dtype=np.int64)[arrays.writers.astype(np.int64)]
    files = {f"{part}.{array}": path.name for part, path in paths.items() for array in ("inputs", "labels", "writers")}
    return Decoded(train[0], test[0], files=files, claims=claims, notes={"writer_names": names})


_FEMNIST_TERMS = "as for EMNIST; LEAF: BSD-2-Clause, TensorFlow Federated: Apache-2.0"

FEMNIST = KnownSet(
    name="femnist",
    title="Federated EMNIST: digits and letters by writer, 62 classes",
    classes=DIGIT_NAMES + _LETTERS,
    shape=(28, 28, 1),
    homepage="https://leaf.cmu.edu",
    terms=_FEMNIST_TERMS,
    editions=(Edition("TensorFlow Federated", 671585, 77483), Edition("LEAF")),
    readers=(
        Reader("fed_emnist_{train,test}.h5 (TensorFlow Federated)", _read_hdf5("fed_emnist")),
        Reader("data/{train,test}/*.json (LEAF)", _read_leaf_folders(only_digits=False)),
    ),
    folders=("FEMNIST",),
)

FEMNIST_DIGITS = KnownSet(
    name="femnist-digits",
    title="Federated EMNIST, digits only: the paper's EMNIST, 3,383 writers",
    classes=DIGIT_NAMES,
    shape=(28, 28, 1),
    homepage="https://leaf.cmu.edu",
    terms=_FEMNIST_TERMS,
    editions=(Edition("TensorFlow Federated", 341873, 40832), Edition("LEAF")),
    readers=(
        Reader("fed_emnist_digitsonly_{train,test}.h5 (TensorFlow Federated)", _read_hdf5("fed_emnist_digitsonly")),
        Reader("data/{train,test}/*.json (LEAF)", _read_leaf_folders(only_digits=True)),
    ),
    folders=("femnist", "FEMNIST"),
)
