"""Cost of a secure sum: processor time and bytes of sites and server, by number of clients and length of the vector.

    python benchmarks/secure_sums.py                              # 3, 10, 30, 100 clients; 10,000 and 600,000 numbers
    python benchmarks/secure_sums.py --clients 10 30 --lost 0.1   # a tenth of the clients are lost while they train

Everything runs in this process, without a network: what is measured is the protocol, beside the encoding of the same
contribution as 32-bit numbers that a plain round sends. The table is printed as Markdown.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np

from fedfa.protection.secure.protocol import SecureClient, SecureServer

SESSION = b"benchmark"


@dataclass(frozen=True)
class Cost:
    """Cost of one session."""

    clients: int
    length: int
    neighbours: int
    client_seconds: float
    """Mean processor time of a client."""
    server_seconds: float
    client_bytes: int
    """Mean number of bytes that a client sends in all stages."""
    plain_bytes: int
    """Bytes of a plain contribution."""


def measure(clients: int, length: int, lost: float) -> Cost:
    """Run one session in which some clients are lost in the third stage; the sum is checked."""
    vectors = {c: np.full(length, c, np.uint64) for c in range(clients)}
    gone = set(range(1, 1 + int(lost * clients)))
    site_seconds = server_seconds = 0.0
    sent = 0
    sites = {c: SecureClient(c, SESSION) for c in vectors}
    server = SecureServer(SESSION, length)

    began = time.process_time()
    keys = [site.advertise() for site in sites.values()]
    site_seconds += time.process_time() - began
    sent += sum(len(one.message_key) + len(one.mask_key) for one in keys)
    began = time.process_time()
    neighbours = server.close_advertisements(keys)
    server_seconds += time.process_time() - began

    began = time.process_time()
    shares = [sites[c].share(others) for c, others in neighbours.items()]
    site_seconds += time.process_time() - began
    sent += sum(len(text) for one in shares for text in one.ciphertexts.values())
    began = time.process_time()
    boxes = server.close_shares(shares)
    server_seconds += time.process_time() - began

    for client, box in boxes.items():
        if client in gone:
            continue
        began = time.process_time()
        masked = sites[client].masked(box, vectors[client])
        site_seconds += time.process_time() - began
        sent += masked.vector.nbytes
        began = time.process_time()
        server.add(masked)
        server_seconds += time.process_time() - began

    asked = server.requests()
    began = time.process_time()
    answers = [sites[c].unmask(*both) for c, both in asked.items()]
    site_seconds += time.process_time() - began
    sent += sum(len(part) for one in answers for kind in (one.seeds, one.mask_keys) for part in kind.values())
    began = time.process_time()
    total = server.total(answers)
    server_seconds += time.process_time() - began
    assert (total == sum(c for c in vectors if c not in gone)).all()
    degree = len(server.graph[0])
    return Cost(clients, length, degree, site_seconds / clients, server_seconds, sent // clients, 4 * length)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000, 600_000])
    parser.add_argument("--lost", type=float, default=0.0, help="Share of the clients lost in the third stage.")
    arguments = parser.parse_args()
    lines = [
        "| numbers | clients | neighbours | CPU s of a site | CPU s of the server | kB sent by a site | plain kB |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for length in arguments.lengths:
        for clients in arguments.clients:
            cost = measure(clients, length, arguments.lost)
            lines.append(
                f"| {length:,} | {clients} | {cost.neighbours} | {cost.client_seconds:.3f} | {cost.server_seconds:.2f} "
                f"| {cost.client_bytes / 1000:,.0f} | {cost.plain_bytes / 1000:,.0f} |"
            )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
