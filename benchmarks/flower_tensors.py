"""Seconds per round over Flower for networks of one size in ever more tensors, and for deep real networks.

    python -m benchmarks.flower_tensors [--tensors 4 164 324 1000] [--models resnet18 deep] [--sites 3] [--rounds 4]

The networks ``TENSORS`` compute the same function of the same million weights, cut into that many tensors: what differs
is only what travels. ``resnet18`` is fedfa's own; ``deep`` has 1,000 linear layers (2,000 tensors). Each is trained by
a real federation of processes on this machine, with TLS and node keys.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console

from fedfa.errors import FedfaError
from fedfa.flower.operate.federation import Value
from fedfa.flower.operate.local_deployment import LocalDeployment
from fedfa.flower.operate.new_app import write_app

APP = '''
from fedfa.flower import make_client_app, make_server_app

TENSORS, KIND = {tensors}, "{kind}"


def load_data(node_config):
    import numpy as np

    draw = np.random.default_rng(int(node_config["partition-id"]))
    shape = (3, 32, 32) if KIND == "resnet18" else (64,)
    y = draw.integers(0, 10, 96)
    x = draw.normal(size=(96, *shape)).astype(np.float32)
    return {{"train": (x[:64], y[:64]), "test": (x[64:], y[64:])}}


def make_model():
    import torch
    from torch import nn

    if KIND == "resnet18":
        from fedfa.models.resnet import resnet18

        torch.manual_seed(0)
        return resnet18((3, 32, 32), 10)

    class Cut(nn.Module):
        """One layer of 1,024 units after a fixed expansion of the input; its weights are cut into pieces."""

        def __init__(self):
            super().__init__()
            pieces = torch.tensor_split(torch.randn(1024 * 1024) / 32, TENSORS - 2)
            self.pieces = nn.ParameterList([nn.Parameter(piece.clone()) for piece in pieces])
            self.head = nn.Linear(1024, 10)

        def forward(self, x):
            weight = torch.cat(list(self.pieces)).reshape(1024, 1024)
            return self.head(torch.relu(nn.functional.linear(x.repeat(1, 16), weight)))

    class Deep(nn.Module):
        """A thousand linear layers of 32 units, each added to its input."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64 if n == 0 else 32, 32) for n in range(999)])
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            x = self.layers[0](x)
            for layer in self.layers[1:]:
                x = x + torch.relu(layer(x)) / 1000
            return self.head(x)

    torch.manual_seed(0)
    return Deep() if KIND == "deep" else Cut()


client = make_client_app(load_data, make_model)
server = make_server_app(make_model)
'''


def seconds_per_round(kind: str, tensors: int, sites: int, rounds: int, folder: Path) -> list[float]:
    """Train; return the seconds between the records of consecutive rounds."""
    app = folder / "app"
    write_app(app)
    (app / "site_app.py").write_text(APP.format(tensors=tensors, kind=kind), encoding="utf-8")
    settings: dict[str, Value] = {
        "rounds": rounds,
        "algorithm": "fedavg",
        "settings": "local.epochs=1 local.batch_size=32 local.lr=0.01",
    }
    times: list[float] = []
    deployment = LocalDeployment(
        app, folder / "run", sites, run_config=settings,
        federation={"wait_seconds": 180.0, "round_seconds": 600.0, "attempts": 1, "evaluation": "sites"},
        on_round=lambda _: times.append(time.monotonic()),
    )  # fmt: skip
    deployment.run()
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="*", default=[4, 164, 324, 1000])
    parser.add_argument("--models", nargs="*", default=["resnet18", "deep"], choices=["resnet18", "deep"])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    chosen = parser.parse_args()
    cases = [("cut", count) for count in chosen.tensors] + [(kind, 0) for kind in chosen.models]
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"| network | seconds a round, median of {chosen.rounds - 1} (with the sites' evaluation) | all |")
    console.print("|---|--:|---|")
    for kind, tensors in cases:
        folder = Path(tempfile.mkdtemp(prefix="fedfa-tensors-"))
        try:
            found = seconds_per_round(kind, tensors, chosen.sites, chosen.rounds, folder)
            result = f"{statistics.median(found):.1f} | {', '.join(f'{one:.1f}' for one in found)}"
        except FedfaError as error:
            result = f"failed | {str(error).splitlines()[0]}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        console.print(f"| {kind if kind != 'cut' else f'{tensors} tensors'} | {result} |", markup=False)


if __name__ == "__main__":
    main()
