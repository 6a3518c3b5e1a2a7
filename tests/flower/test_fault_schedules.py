"""Whatever goes wrong on the way, a run ends with the bits of a run without faults; the failing seed is printed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path

import pytest

from fedfa.errors import FedfaError
from fedfa.experiment.files import load_tensors
from fedfa.flower import transport
from tests.experiment.run_toys import equal_tensors, timeless
from tests.flower.faults import KINDS, FaultyGrid, ServerKilledError, full_disk, schedule
from tests.flower.small_sites import serve, small_grid

LIMIT = 240.0
"""Seconds after which a run counts as hanging; a quiet one takes less than one on an idle machine."""
RULES = {
    "federation__quorum": 1.0, "federation__round_seconds": 0.5, "federation__wait_seconds": 0.5,
    "federation__link_seconds": 30.0, "federation__lost_state": "refuse",
}  # fmt: skip


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quiet")
    return serve(folder / "run", small_grid(folder))


def survive(seed: int, folder: Path, quiet: Path) -> list[str]:
    """Run with the faults of a seed, starting the server again whenever it ends; return what happened."""
    grid = FaultyGrid(small_grid(folder), schedule(seed))
    deadline = time.monotonic() + LIMIT
    out = folder / "run"
    while not (out / "summary.json").exists():
        assert time.monotonic() < deadline, f"seed {seed}: no result in {LIMIT:.0f} s after {grid.happened}"
        disk = full_disk() if grid._due("server disk full") else contextlib.nullcontext()
        with contextlib.suppress(FedfaError, ServerKilledError), disk:
            serve(out, grid, **RULES)
    for name in ("model.safetensors", "server.safetensors"):
        assert equal_tensors(load_tensors(out / name), load_tensors(quiet / name)), f"seed {seed}: {grid.happened}"
    accuracies = [[record["accuracy"] for record in timeless(path)] for path in (out, quiet)]
    assert accuracies[0] == accuracies[1], f"seed {seed}: {grid.happened}"
    return grid.happened


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_RETRY_SECONDS", 0.001)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_survives_the_faults_of_a_seed(seed: int, tmp_path: Path, quiet: Path) -> None:
    survive(seed, tmp_path, quiet)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_schedules(part: int, tmp_path: Path, quiet: Path) -> None:
    happened: Counter[str] = Counter()
    for seed in range(20 * part, 20 * part + 20):
        happened.update(survive(seed, tmp_path / str(seed), quiet))
    print(dict(happened))  # noqa: T201  (pytest shows it)
    assert set(happened) <= set(KINDS)
    assert len(happened) >= 5
