"""How a round grows with the federation: many clients, large cohorts, on data made up for it.

    python -m fedfa.bench.scaling --clients 1000000 --cohort 100 --rounds 5

Each client has ten pictures of 4×4 pixels, so a million clients have ten million. The data set is made first and is
not counted; what counts is all that fedfa adds to it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from fedfa.bench.plain import clock, report

SAMPLES, SIDE, CLASSES = 10, 4, 10


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--cohort", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithm", default="fedavg")
    asked = parser.parse_args(arguments)

    from fedfa.bench.processes import resident_memory
    from fedfa.studies.run import run
    from fedfa.studies.settings import Settings

    last = asked.rounds + 1
    settings = Settings.resolve(
        {
            "rounds": last,
            "device": "cpu",
            "data": {"clients": asked.clients, "partition": "iid"},
            "model": {"name": "mlp", "options": {"hidden": [32]}},
            "algorithm": {"recipe": asked.algorithm},
            "cohort": {"clients": asked.cohort},
            "local": {"epochs": 5, "batch_size": 5},
            "evaluation": {"every": last},
            "checkpoint": {"every": last},
            "engine": {"workers": 1},
        }
    )
    data = pictures(asked.clients * SAMPLES)
    held = sum(tensor.nbytes for part in (data.train, data.test) for tensor in (part.inputs, part.labels))
    ends: list[float] = []
    memory: list[int] = []

    def watch(_: dict[str, Any]) -> None:
        ends.append(clock())
        memory.append(resident_memory())

    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        run(settings, Path(folder) / "run", data=data, watch=watch)
    report(
        ends[:-1],
        clients=asked.clients,
        cohort=asked.cohort,
        setup=ends[0] - begun,  # with the first round
        resident_mb=(max(memory) - held) / 2**20,
        data_mb=held / 2**20,
    )


def pictures(number: int) -> Any:
    """A data set of so many random pictures."""
    import numpy as np
    import torch

    from fedfa.data import DataSet, Samples
    from fedfa.data.normalise import Normalisation
    from fedfa.learning.random import stream

    rng = stream(1, "bench pictures")

    def some(count: int) -> Samples:
        pixels = rng.integers(0, 256, (count, SIDE, SIDE, 1), dtype=np.uint8)
        labels = rng.integers(0, CLASSES, count, dtype=np.int64)
        return Samples(torch.from_numpy(pixels), torch.from_numpy(labels))

    return DataSet(
        name="made-up pictures",
        train=some(number),
        test=some(1000),
        classes=tuple(map(str, range(CLASSES))),
        domains=(),
        normalisation=Normalisation((0.5,), (0.25,)),
        fingerprint=f"{number} made-up pictures",
        manifest={},
    )


if __name__ == "__main__":
    main()
