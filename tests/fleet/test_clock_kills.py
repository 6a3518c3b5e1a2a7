"""Asynchronous runs behind a channel that are killed for real, at moments drawn at random."""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.experiment.run_toys import STATEFUL
from tests.experiment.test_kills import Forked, asked, kill_until_done

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork and signals"),
]

SETTINGS = {
    "fedbuff": [
        "fleet.policy=fedbuff",
        "fleet.buffer=2",
        "fleet.concurrency=5",
        "channel.up=topk",
        "channel.share=0.2",
    ],
    "next": ["fleet.policy=deadline", "fleet.deadline=1.5", "fleet.late=next", "channel.up=int4", "channel.down=int8"],
}


def test_twenty_kills(tmp_path: Path, data_dir: Path) -> None:
    draw = random.Random(23)
    together: Counter[str] = Counter()
    for name, settings in SETTINGS.items():
        plan = ["start-up"] * 2 + ["training"] * 5 + ["writing"] * 4
        draw.shuffle(plan)
        (directory := tmp_path / name).mkdir()
        arguments = asked(directory, data_dir, STATEFUL, 60, 2)
        for one in ["fleet.devices=lognormal", *settings]:
            arguments += ["--set", one]
        together += kill_until_done(directory, arguments, Forked, plan, draw)
    assert together.total() >= 20
    assert min(together["training"], together["writing"]) >= 4
