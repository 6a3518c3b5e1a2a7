"""Flower: ServerApp and ClientApp, its FedAvg, its simulation on Ray with one core per client.

python run_flower.py --task cnn --rounds 6
"""

import argparse
import os
from importlib.metadata import version

parser = argparse.ArgumentParser()
parser.add_argument("--task", default="cnn")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--cores", type=int, default=2)
options = parser.parse_args()
# Before the imports: Flower and Ray read these when they are loaded.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    OMP_NUM_THREADS="1", BENCH_TASK=options.task,
)  # fmt: skip

from flower_client import client, task
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.bench.contender_api import clock, network, report

server = ServerApp()
ends = []


class Clock(FedAvg):
    """Records the end of each round."""

    def aggregate_train(self, server_round, replies):
        """After the server's step."""
        out = super().aggregate_train(server_round, replies)
        ends.append(clock())
        return out


@server.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds; nothing is evaluated."""
    strategy = Clock(fraction_train=task.cohort / task.clients, fraction_evaluate=0.0, min_available_nodes=task.clients)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(network(task).state_dict()), num_rounds=options.rounds)
    report(ends, release=version("flwr"))


if __name__ == "__main__":
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=task.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            # A separate Ray cluster, even if another one is running.
            "init_args": {"address": "local", "num_cpus": options.cores, "_node_ip_address": "127.0.0.1"},
        },
    )
