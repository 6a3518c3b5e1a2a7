"""A million clients with availability: processor time and memory per server step, FedBuff and the synchronous round.

    python benchmarks/fleet_million.py [CLIENTS]

Each client holds two of 2 · CLIENTS samples of eight numbers; 1,000 train at a time, and a server step takes 1,000
contributions. The same work is done without a clock, in synchronous rounds on a clock, and by FedBuff. Prints a table.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import numpy as np

import fedfa
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment

STEPS = 5
AT_ONCE = 1000
DAILY = {"devices": "phones", "availability": "daily"}
SETTINGS: dict[str, dict[str, Any]] = {
    "no clock": {},
    "wait for all": DAILY,
    "fedbuff": {**DAILY, "policy": "fedbuff", "buffer": AT_ONCE, "concurrency": AT_ONCE},
}


def main(clients: int) -> None:
    """Measure and print."""
    draw = np.random.default_rng(1)
    labels = np.arange(2 * clients) % 10
    points = (draw.standard_normal((2 * clients, 8)) + np.eye(10, 8)[labels]).astype(np.float32)
    federation = fedfa.data.dataset_from((points, labels)).split("iid", clients=clients, seed=1)
    del points
    print(f"{clients:,} clients, {AT_ONCE:,} at a time, {STEPS} server steps; data: {_peak():.0f} MB")
    for name, fleet in SETTINGS.items():
        config = Config.resolve({
            "rounds": STEPS, "seed": 1, "data": {"clients": clients}, "algorithm": {"name": "fedavg"},
            "model": {"name": "mlp", "options": {"hidden": [16]}}, "cohort": {"clients": AT_ONCE},
            "local": {"epochs": 1, "batch_size": 2, "lr": 0.1}, "evaluation": {"every": STEPS}, "fleet": fleet,
            "engine": {"workers": 1, "execution": "stacked"},
        })  # fmt: skip
        experiment = Experiment.from_config(config, data=federation)
        began, seconds = time.process_time(), []
        for _ in experiment.rounds(progress=False):
            seconds.append(time.process_time() - began)
            began = time.process_time()
        last = experiment.records[-1]
        virtual = f"virtual time {last['time']:,.2f} s, utilisation {last['utilisation']:.0%}" if fleet else ""
        spent = f"{np.median(seconds[1:]):6.2f} CPU s per server step"
        print(f"{name:14s} {spent}   peak memory {_peak():,.0f} MB   {virtual}")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
