"""The same experiment in the simulator and through Flower: the same bits.

Nothing in a client's work depends on where it is done: its randomness is keyed by seed, round and number, tensors
arrive to the bit, and sums are added in the order of the cohort. So weights, server state, metrics and what clients
keep must be equal, not close.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedfa.experiment.files import load_tensors
from fedfa.experiment.run import RunResult, run
from fedfa.flower.config import RunConfig
from fedfa.flower.server_app import make_server_app
from fedfa.learning.tensors import Tensors
from fedfa.report.html.write import Reporter
from tests.experiment.run_toys import client_states, equal_tensors, timeless
from tests.flower import small_sites
from tests.flower.loopback import QUICK, federate
from tests.flower.small_sites import SITES, serve, small_grid


def simulate(tmp_path: Path, config: dict[str, Any], data_dir: Path, **more: Any) -> RunResult:
    settings = RunConfig({**QUICK, **config, "data.dir": str(data_dir)}).config(SITES)
    return run(settings, tmp_path / "simulated", **more)


def assert_same(flower: Path, simulated: Path) -> None:
    for name in ("model.safetensors", "server.safetensors"):
        assert equal_tensors(load_tensors(flower / name), load_tensors(simulated / name)), f"{name} differs"
    records = timeless(flower)
    assert all(record.pop("federation")["seconds"] for record in records)
    assert records == timeless(simulated)


def state_on_sites(tmp_path: Path, flower: Path) -> dict[str, Tensors]:
    """Current client state on the sites, named as in the simulator."""
    versions = {
        name.split(".")[0]: int(receipt["site/versions"][-1]) for name, receipt in client_states(flower).items()
    }
    (state,) = (tmp_path / "state").iterdir()
    return {
        f"{client}.round{version}.safetensors": load_tensors(state / f"site{client}.round{version}.safetensors")
        for client, version in versions.items()
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        *("fedfa", "scaffold", "feddyn", "moon", "fedproto", "ccvr"),
        *(
            pytest.param(algorithm, marks=pytest.mark.slow)
            for algorithm in ("fedfa+fedadam", "fednova", "matching", "fedproc")
        ),
    ],
)
def test_flower_and_the_simulator_agree_bit_for_bit(algorithm: str, tmp_path: Path, data_dir: Path) -> None:
    config = {"algorithm": algorithm, "cohort.clients": 3}
    flower = federate(tmp_path, {**config, "data.dir": str(data_dir)}, SITES)
    simulated = simulate(tmp_path, config, data_dir)
    assert_same(flower, simulated.directory)
    client_state = client_states(simulated.directory)
    assert bool(client_state) == (algorithm in ("scaffold", "feddyn", "moon", "fedproto"))
    if client_state:
        there = state_on_sites(tmp_path, flower)
        assert there.keys() == client_state.keys()
        assert all(equal_tensors(there[name], client_state[name]) for name in client_state)


def test_the_report_of_a_flower_run_equals_the_simulators(tmp_path: Path, data_dir: Path) -> None:
    """One page with both runs: the same curve, and a federation's run directory is like any other."""
    config = {"algorithm": "fedfa", "rounds": 2}
    flower = federate(tmp_path, {**config, "data.dir": str(data_dir)}, SITES)
    simulated = simulate(tmp_path, config, data_dir)
    reporter = Reporter([flower, simulated.directory], tmp_path / "report.html", (), True, "")
    assert not reporter.write().problems
    over_flower, here = reporter.runs()
    assert [record["accuracy"] for record in over_flower.evaluated] == [record["accuracy"] for record in here.evaluated]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"{100 * simulated.final_accuracy:.2f}" in page


def test_anchors_move_and_the_model_learns(tmp_path: Path, data_dir: Path) -> None:
    """Equal to the simulator could also mean that neither does anything."""
    flower = federate(tmp_path, {"algorithm": "fedfa", "rounds": 2, "data.dir": str(data_dir)})
    state = load_tensors(flower / "server.safetensors")
    anchors = [value for name, value in state.items() if name.startswith("anchors/")]
    assert anchors
    assert any(value.abs().sum() > 0 for value in anchors if value.is_floating_point())
    accuracies = [record["accuracy"] for record in timeless(flower)]
    assert accuracies[-1] > 0.3


# -- the sites' own data and network ----------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["fedfa", "scaffold"])
def test_own_data_and_network_train_as_in_the_simulator(algorithm: str, tmp_path: Path) -> None:
    flower = serve(tmp_path / "flower", small_grid(tmp_path), algorithm=algorithm)
    assert_same(flower, small_sites.simulate(tmp_path / "simulated", algorithm=algorithm).directory)
    assert load_tensors(flower / "model.safetensors")["norm.num_batches_tracked"].dtype == torch.int64


def test_personal_layers_train_as_in_the_simulator_and_are_evaluated_at_the_sites(
    tmp_path: Path,
) -> None:
    """FedBN has no global model: what is tested is each site's own, on the site's own test samples."""
    config: dict[str, Any] = {"algorithm": "fedbn", "cohort__clients": 3}
    flower = serve(tmp_path / "flower", small_grid(tmp_path), **config)
    simulated = small_sites.simulate(tmp_path / "simulated", **config).directory
    assert equal_tensors(load_tensors(flower / "server.safetensors"), load_tensors(simulated / "server.safetensors"))
    client_state, there = client_states(simulated), state_on_sites(tmp_path, flower)
    assert client_state
    assert there.keys() == client_state.keys()
    assert all(equal_tensors(there[name], client_state[name]) for name in client_state)
    for record in timeless(flower):
        assert list(record["client_accuracy"]) == [str(client) for client in record["cohort"]]
        # Fifteen test samples a site, so an accuracy is a multiple of a fifteenth.
        assert all(round(15 * share, 9).is_integer() for share in record["client_accuracy"].values())


def test_without_test_data_on_the_server_the_sites_evaluate(tmp_path: Path) -> None:
    config = {**QUICK, **small_sites.OWN}
    server = make_server_app(small_sites.Small)
    sites = federate(tmp_path, config, SITES, app=small_sites.CLIENT, server=server, folder="sites")
    both = serve(tmp_path / "both", small_grid(tmp_path), federation__evaluation="both")
    # The sites' test samples together are the server's: their evaluations combined are its own.
    for ours, theirs in zip(timeless(sites), timeless(both), strict=True):
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-12)
        assert ours["accuracy"] == pytest.approx(theirs["federation"]["sites_accuracy"], abs=1e-12)
        assert ours["class_accuracy"] == pytest.approx(theirs["class_accuracy"], abs=1e-12)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
