"""Run directories to report on, from short real runs; one browser for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.experiment.run import run
from tests.experiment.run_toys import small
from tests.report.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, blobs: DataSet) -> Path:
    """A directory of finished runs: FedFA with two seeds, FedAvg with one, one with a final pass."""
    place = tmp_path_factory.mktemp("runs") / "blobs-c2"
    line_style = {"diagnostics": {"every": 2, "samples": 40}}
    stored = {"diagnostics": {**line_style["diagnostics"], "features": [-1]}}
    run(small("fedfa", seed=1, **stored), place / "fedfa-s1", data=blobs)
    run(small("fedfa", seed=2, **line_style), place / "fedfa-s2", data=blobs)
    run(small("fedavg", seed=1, **line_style), place / "fedavg-s1", data=blobs)
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
