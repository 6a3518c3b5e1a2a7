"""Runs a command in a network of its own, in which there is this machine only, and notes whom it tried to reach.

``unshare --map-root-user --net python only_loopback.py REPORT COMMAND …``. In the new network every address leads to
this machine (a local route for all of them), where nobody listens but this program: on port 53 for questions to name
servers, and on ports 80 and 443. So an attempt does not only fail, it is seen, with the name that was asked for.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path


def main(report: Path, command: list[str]) -> int:
    for action in ("link set lo up", "route add local 0.0.0.0/0 dev lo"):
        subprocess.run(["ip", *action.split()], check=True)
    sought: list[str] = []
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind(("0.0.0.0", 53))
    threading.Thread(target=_hear_questions, args=(names, sought), daemon=True).start()
    for port in (80, 443):
        server = socket.create_server(("0.0.0.0", port))
        threading.Thread(target=_hear_calls, args=(server, sought), daemon=True).start()
    done = subprocess.run(command, check=False)
    report.write_text(json.dumps(sorted(set(sought))))
    return done.returncode


def _hear_questions(names: socket.socket, sought: list[str]) -> None:
    while True:
        question, asker = names.recvfrom(4096)
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode(errors="replace"))
            at += 1 + question[at]
        sought.append(".".join(labels))
        # "No such name", at once: whoever asks shall not wait for it.
        names.sendto(question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12 : at + 5], asker)


def _hear_calls(server: socket.socket, sought: list[str]) -> None:
    while True:
        connection, _ = server.accept()
        sought.append(f"{connection.getsockname()[0]}:{connection.getsockname()[1]}")
        connection.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
