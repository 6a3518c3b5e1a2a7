"""Whole rounds of a federation, plain and with secure sums: seconds and bytes by clients and size of the model.

    python -m benchmarks.secure_rounds --out results/privacy/secure-rounds.json
    python -m benchmarks.secure_rounds --clients 3 10 --hidden 128 --out FILE      # a part of it

The server's app and the sites' apps run in this process, one after the other; every message goes through Flower's own
serialisation, whose bytes are counted. There is no network and no start of processes: seconds are those of all work of
server and sites, training included. Each row is the second of two rounds of FedFA on digits; rows that the file has are
not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedfa.experiment.run import processor_name, source_commit
from fedfa.flower.client_app import make_client_app
from tests.flower.loopback import LoopbackGrid, federate, node_configs

Row = dict[str, Any]


class CountingGrid(LoopbackGrid):
    """Sites in this process, with the bytes of all messages by direction."""

    sent = received = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Count what goes to the sites."""
        asked = list(messages)
        self.sent += sum(map(_size, asked))
        return super().push_messages(asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Count what comes back."""
        replies = list(super().pull_messages(message_ids))
        self.received += sum(map(_size, replies))
        return replies


def _size(message: Message) -> int:
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def measure(clients: int, hidden: int, masks: bool) -> Row:
    """The difference between a run of two rounds and one of one round."""
    costs = []
    for rounds in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            grid = CountingGrid(node_configs(Path(folder), clients), {}, make_client_app())
            layer = f"model.options={{hidden=[{hidden}]}} local.epochs=1 local.batch_size=32 cohort.rate=1.0"
            config = {"rounds": rounds, "algorithm": "fedfa", "settings": layer, "privacy.masks": masks}
            began = time.process_time()
            federate(Path(folder), config, clients, grid=grid)
            costs.append((time.process_time() - began, grid.sent, grid.received))
    seconds, sent, received = (second - first for first, second in zip(*costs, strict=True))
    return {
        "clients": clients, "numbers": 64 * hidden + hidden + 10 * hidden + 10 + 10 * hidden, "hidden": hidden,
        "masks": masks, "cpu_seconds": round(seconds, 3), "bytes_to_a_site": sent // clients,
        "bytes_from_a_site": received // clients, "commit": source_commit(), "machine": processor_name(),
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """A plain and a secure round side by side."""
    lines = [
        "| numbers | clients | CPU s, plain | secure | kB from a site, plain | secure | kB to a site, plain | secure |",
        f"|{'--:|' * 8}",
    ]
    for key in sorted({(row["numbers"], row["clients"]) for row in rows}):
        pair = {row["masks"]: row for row in rows if (row["numbers"], row["clients"]) == key}
        if len(pair) == 2:
            cells = [f"{pair[masks]['cpu_seconds']:.2f}" for masks in (False, True)]
            for name in ("bytes_from_a_site", "bytes_to_a_site"):
                cells += [f"{pair[masks][name] / 1000:,.0f}" for masks in (False, True)]
            lines.append(f"| {key[0]:,} | {key[1]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 7000])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.out.read_text("utf-8")) if options.out.exists() else []
    done = {(row["clients"], row["hidden"], row["masks"]) for row in rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for hidden in options.hidden:
        for clients in options.clients:
            for masks in (False, True):
                if (clients, hidden, masks) not in done:
                    rows.append(measure(clients, hidden, masks))
                    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
