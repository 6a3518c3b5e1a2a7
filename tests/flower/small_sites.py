"""Four sites with a few points each and a tiny network: a run through Flower's messages in a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch import nn

from fedfa.data import DataSet, Normalisation, Samples
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import RunResult, run
from fedfa.flower.client_app import make_client_app
from fedfa.flower.config import RunConfig
from fedfa.flower.server_app import make_server_app
from tests.conftest import make_blobs
from tests.flower.loopback import QUICK, LoopbackGrid, Tamper, node_configs

SITES = 4
OWN: dict[str, Any] = {
    "preset": "",
    "settings": "local.epochs=1 local.lr=0.1 local.batch_size=16 device=cpu",
    "algorithm": "scaffold",
    "federation.round_seconds": 0.05,
    "federation.wait_seconds": 0.05,
}


class Small(nn.Module):
    """A network with BatchNorm: a counter that must stay an integer, and statistics that are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.relu(self.norm(self.hidden(x))))
        return logits


BLOBS = make_blobs()


def own_of(site: int) -> dict[str, Any]:
    """Site 0 has no sample of class 3: only the network knows how many classes there are."""
    train, test = BLOBS.train, BLOBS.test
    chosen = torch.arange(len(train)) // 4 % SITES == site
    chosen &= (train.labels != 3) | torch.tensor(site != 0)
    return {
        "train": (train.inputs[chosen].numpy(), train.labels[chosen].numpy()),
        "test": (test.inputs[15 * site :][:15].numpy(), test.labels[15 * site :][:15].numpy()),
    }


CLIENT = make_client_app(lambda node: own_of(int(node["partition-id"])), Small)
SERVER = make_server_app(Small, lambda _: (BLOBS.test.inputs.numpy(), BLOBS.test.labels.numpy()))


def small_grid(tmp_path: Path, tamper: Tamper | None = None) -> LoopbackGrid:
    """The four sites."""
    return LoopbackGrid(node_configs(tmp_path, SITES), {}, CLIENT, tamper)


def serve(out: Path, grid: LoopbackGrid, **config: Any) -> Path:
    """A run with these sites, from start or checkpoint to end."""
    values = {**QUICK, **OWN, "federation.run_folder": str(out)}
    values |= {key.replace("__", "."): value for key, value in config.items()}
    grid.run_config = values
    SERVER(grid, Context(1, 0, {}, RecordDict(), values))
    return out


def simulate(out: Path, kind: type[Experiment] = Experiment, **config: Any) -> RunResult:
    """The same run in the simulator, optionally with another kind of experiment."""
    shares = [own_of(site)["train"] for site in range(SITES)]
    together = Samples(
        torch.cat([torch.from_numpy(x) for x, _ in shares]),
        torch.cat([torch.from_numpy(y) for _, y in shares]),
        writers=torch.cat([torch.full((len(y),), site) for site, (_, y) in enumerate(shares)]),
    )
    data = DataSet("own", together, BLOBS.test, ("0", "1", "2", "3"), (), Normalisation(), "x", {})
    values = {**QUICK, **OWN, **{key.replace("__", "."): value for key, value in config.items()}}
    settings = RunConfig(values, own_data=True).config(SITES)
    return run(settings, out, experiment=lambda _: kind.from_config(settings, model=Small, data=data))
