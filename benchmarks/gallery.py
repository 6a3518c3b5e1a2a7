"""The gallery of docs/own_data.md: everyone's data, trained by FedAvg and FedFA.

``python -m benchmarks.gallery`` prints the table of the page. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedfa
from fedfa.data import Federation, dataset_from, federation_from

ROUNDS = 20
Example = tuple[Federation, Any]
"""The clients, and the network."""


def breast_cancer() -> Example:
    """A float table of 30 columns (scikit-learn), two clients in five with one class only."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    dataset = dataset_from((table.data, table.target), name="breast-cancer", classes=list(table.target_names))
    return dataset.split("dirichlet:0.3", clients=10, seed=1).standardised(), "mlp"


class Words(nn.Module):
    """The mean of the embeddings of the words that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits of four topics."""
        weights = mask.float().unsqueeze(-1)
        logits: Tensor = self.head(self.hidden((self.words(tokens) * weights).sum(1) / weights.sum(1)))
        return logits


def topics() -> Example:
    """Texts of 5 to 20 words with a mask: of four topics, each with words of its own among common ones."""
    rng = np.random.default_rng(1)
    labels = np.arange(2000) % 4
    own = rng.integers(0, 25, (2000, 20)) + 25 * labels[:, None]
    tokens = np.where(rng.random((2000, 20)) < 0.25, own, rng.integers(100, 200, (2000, 20)))
    mask = np.arange(20) < rng.integers(5, 21, (2000, 1))
    dataset = dataset_from(({"tokens": tokens, "mask": mask}, labels), name="topics")
    return dataset.split("shards:2", clients=20, seed=1), Words


def deep_pictures() -> Example:
    """Grey pictures of 16 bits in class folders: the classes differ below the eighth bit."""
    from PIL import Image

    rng = np.random.default_rng(2)
    with tempfile.TemporaryDirectory() as folder:
        for label, name in enumerate(("left", "right")):
            for part, count in (("train", 150), ("test", 50)):
                (target := Path(folder) / part / name).mkdir(parents=True)
                for number in range(count):
                    pixels = rng.normal(1000, 40, (12, 12))
                    pixels[:, 6 * label : 6 * label + 6] += 60
                    Image.fromarray(pixels.astype(np.uint16)).save(target / f"{number}.png")
        return dataset_from(folder, name="16-bit").split("shards:1", clients=10, seed=1), "mlp"


def hospitals() -> Example:
    """A list of hospitals as clients: the share of the sick differs, and so does the size."""
    rng = np.random.default_rng(3)
    clients = {}
    for number in range(6):
        size = 60 + 40 * number
        labels = (rng.random(size) < 0.2 + 0.1 * number).astype(int)
        values = rng.normal(size=(size, 5)) + 1.2 * labels[:, None] * [1, -1, 0.5, 0, 0]
        clients[f"hospital {number}"] = (values * [1, 10, 100, 5, 50] + 200, labels)
    return federation_from(clients, name="hospitals").standardised(), "mlp"


def frame() -> Example:
    """A pandas DataFrame: scikit-learn's wine, with a column of producers as clients."""
    import pandas
    from sklearn.datasets import load_wine

    wine = load_wine()
    table = pandas.DataFrame(wine.data, columns=wine.feature_names)
    table["label"] = [str(wine.target_names[label]) for label in wine.target]
    table["producer"] = [f"producer {number}" for number in np.random.default_rng(4).integers(0, 6, len(table))]
    return dataset_from(table, name="wine", clients="producer").split("natural").standardised(), "mlp"


def hub() -> Example:
    """A Hugging Face data set: scikit-learn's digits as pictures."""
    import datasets
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = [Image.fromarray(picture) for picture in (digits.images * 15).astype(np.uint8)]
    names = datasets.ClassLabel(names=[str(number) for number in range(10)])
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": digits.target.tolist()}, datasets.Features(image=datasets.Image(), label=names)
    )
    return dataset_from(rows, name="digits-hub").split("shards:2", clients=20, seed=1), "mlp"


GALLERY: dict[str, Callable[[], Example]] = {
    "breast cancer": breast_cancer,
    "topics": topics,
    "16-bit pictures": deep_pictures,
    "hospitals": hospitals,
    "pandas": frame,
    "Hugging Face": hub,
}


def scores(example: Example, algorithm: str, rounds: int = ROUNDS) -> tuple[float, float]:
    """Accuracy and macro F1 on the test set after some rounds."""
    data, model = example
    local = fedfa.LocalTraining(epochs=3, batch_size=16, lr=0.05)
    experiment = fedfa.Experiment(
        algorithm,
        data=data,
        model=model,
        cohort=0.5,
        local=local,
        evaluate_every=rounds,
        metrics=["macro_f1"],
        workers=1,
    )
    *_, last = experiment.rounds(rounds, progress=False)
    assert last.accuracy is not None
    return last.accuracy, last["metrics"]["macro_f1"]


def table() -> str:
    """The table of the page."""
    lines = [
        "| example | clients | FedAvg: accuracy | macro F1 | FedFA: accuracy | macro F1 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, make in GALLERY.items():
        example = make()
        cells = [f"{value:.1%}" for algorithm in ("fedavg", "fedfa") for value in scores(example, algorithm)]
        lines.append(f"| {name} | {len(example[0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(table() + "\n")
