"""Processor time of the codecs, and what they make of real updates.

    python -m benchmarks.channel_cost                    # prints the table; writes results/channel/cost.json
    python -m benchmarks.channel_cost --table            # prints the table of the recorded measurement

One client of Fashion-MNIST (#C = 2) trains the paper's CNN for five epochs; its update and the model pass the
codecs. Measured are the median processor seconds of seven repetitions on one thread, the bytes, and the relative
error ‖x − x̂‖ / ‖x‖. The training itself is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfa.channel.codecs import QUANTISED, codec
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import processor_name, source_commit
from fedfa.text_tables import markdown_table

FILE = Path("results/channel/cost.json")
NAMES = ("float32", "float16", *QUANTISED, *(f"{name}+deflate" for name in QUANTISED[:3]), "sign", "topk", "randomk")
REPETITIONS = 7


def _median_seconds(action: Callable[[], object]) -> float:
    spent = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        action()
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def measure() -> dict[str, Any]:
    """All numbers."""
    torch.set_num_threads(1)
    config = Config.preset("fmnist-c2", {"algorithm": {"name": "fedavg"}, "engine": {"execution": "each"}})
    experiment = Experiment.from_config(config)
    plan = experiment.training.plan(experiment.state, experiment.config.local)
    (result,) = experiment.local_engine().train(plan, [0], lambda _: {})
    (entry,) = result.contribution.values()
    update = [(value / entry.weight).numpy().ravel() for value in entry.tensors.values()]
    model = [value.numpy().ravel() for value in experiment.state.model.values()]
    rows = [_row(name, update, "update") for name in NAMES]
    rows += [_row(name, model, "model") for name in ("float16", "int8", "int4", "int8+deflate")]
    return {
        "command": "python -m benchmarks.channel_cost", "commit": source_commit(), "machine": processor_name(),
        "seed": config.seed, "numbers": sum(map(len, update)), "training_seconds": round(result.cpu_seconds, 3),
        "rows": rows,
    }  # fmt: skip


def _row(name: str, tensors: list[np.ndarray], what: str) -> dict[str, Any]:
    one, rng = codec(name), np.random.default_rng(1)
    packed = [one.encode(x, rng) for x in tensors]
    arrived = [one.decode(data, len(x)) for data, x in zip(packed, tensors, strict=True)]
    lost = sum(float(np.square(a.astype(np.float64) - x).sum()) for a, x in zip(arrived, tensors, strict=True))
    whole = sum(float(np.square(x.astype(np.float64)).sum()) for x in tensors)
    return {
        "codec": name,
        "of": what,
        "bytes": sum(data.nbytes for data in packed),
        "encode": _median_seconds(lambda: [one.encode(x, rng) for x in tensors]),
        "decode": _median_seconds(lambda: [one.decode(d, len(x)) for d, x in zip(packed, tensors, strict=True)]),
        "error": (lost / whole) ** 0.5,
    }


def table(measured: dict[str, Any]) -> str:
    """As docs/fleet.md shows it."""
    count = measured["numbers"]
    rows = [
        [
            row["codec"], row["of"], f"{row['bytes'] / 1e6:.3f}", f"{8 * row['bytes'] / count:.2f}",
            f"{1e3 * row['encode']:.1f}", f"{1e3 * row['decode']:.1f}", f"{row['error']:.3f}",
        ]
        for row in measured["rows"]
    ]  # fmt: skip
    return markdown_table(["codec", "of", "MB", "bits per number", "encode, ms", "decode, ms", "relative error"], rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print the recorded measurement")
    if not parser.parse_args().table:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(json.dumps(measure(), indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(table(json.loads(FILE.read_text(encoding="utf-8"))) + "\n")


if __name__ == "__main__":
    main()
