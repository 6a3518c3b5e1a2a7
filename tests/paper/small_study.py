"""A study like the paper's on data that are at hand, so small that its runs take a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedfa.experiment.config import Config
from fedfa.paper.cells import Place
from fedfa.paper.declarations import Study, read_study

DECLARED = """# A small study
kind = "table"
rounds = 4
seeds = [1, 2]
first = ["fedfa"]

[config]
device = "cpu"
model.name = "logistic"
data.clients = 10
cohort.clients = 2
local.epochs = 1

[[columns]]
name = "digits/c2"
group = "digits"
title = "#C = 2"
preset = "digits-c2"

[[columns]]
name = "digits/iid"
group = "digits"
title = "no skew"
preset = "digits-c2"
config.data.partition = "iid"
rows = ["fedavg", "fedfa"]

[[rows]]
name = "fedavg"
title = "FedAvg"

[[rows]]
name = "fedavg-ccvr"
title = "FedAvg with CCVR"
after = "fedavg"
adds = "ccvr"

[[rows]]
name = "no-calibration"
title = "FedFA w/o calibration"
config.algorithm.name = "fedfa"
config.algorithm.calibration.when = "never"

[[rows]]
name = "fedfa"
title = "FedFA"

[[rows]]
name = "ideal"
title = "FedFA from its own anchors"
config.algorithm.name = "fedfa"
from_server."algorithm.anchors.init" = "fedfa"
"""


def small_study(text: str = DECLARED) -> Study:
    """The study above, or a changed one."""
    return read_study("small", text)


def place(study: Study, column: str, row: str, reading: str = "authors") -> Place:
    """A place by its names."""
    return Place(study, next(one for one in study.columns if one.name == column), study.row(row), reading)


def pretend_run(folder: Path, config: Config, accuracy: float | None) -> Path:
    """A record as a finished run leaves it (with an accuracy) or a run that was begun (without)."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    if accuracy is not None:
        summary: dict[str, Any] = {
            "final_accuracy": accuracy, "best_accuracy": accuracy, "last10_accuracy": accuracy,
            "rounds": config.rounds, "seeds": {"training": config.seed, "data": config.data.seed},
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder
