"""Run folders to report on: real short runs, and one browser for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.studies.run import run
from tests.report.browser import Browser, find_chromium
from tests.studies.study_toys import small


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, blobs: DataSet) -> Path:
    """A folder of finished runs: FedFA with two seeds, FedAvg with one, one with a step after the last round."""
    place = tmp_path_factory.mktemp("runs") / "blobs-c2"
    look = {"insight": {"every": 2, "samples": 40}}
    stored = {"insight": {**look["insight"], "features": [-1]}}
    run(small("fedfa", seed=1, **stored), place / "fedfa-s1", data=blobs)
    run(small("fedfa", seed=2, **look), place / "fedfa-s2", data=blobs)
    run(small("fedavg", seed=1, **look), place / "fedavg-s1", data=blobs)
    run(small("fedavg+ccvr", seed=1), place / "fedavg-ccvr-s1", data=blobs)
    return place


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with Browser(program) as running:
        yield running
