"""No telemetry: a federation in a network namespace with a trap that records every attempted connection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedfa.flower.operate.new_app import write_app

TRAP = Path(__file__).with_name("only_loopback.py")
COMMANDS = Path(sys.executable).parent


def obstacle() -> str | None:
    """Why there can be no network of our own, if so."""
    if missing := [command for command in ("unshare", "ip") if shutil.which(command) is None]:
        return f"no command {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"network namespaces are not permitted here: {tried.stderr.strip()}"


needs_namespaces = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "")


def run_in_trap(
    folder: Path, *command: str, environment: dict[str, str] | None = None, seconds: float = 600
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a command there: how it ended, and whom it tried to reach."""
    report = folder / "report.json"
    inside = [sys.executable, str(TRAP), str(report), *command]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", *inside],
        env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert report.exists(), done.stderr
    sought: list[str] = json.loads(report.read_text())
    return done, sought


@needs_namespaces
def test_the_trap_sees_names_and_addresses_and_lets_loopback_through(tmp_path: Path) -> None:
    script = """
import socket
try: socket.getaddrinfo("fleet.example.org", 443)
except OSError: pass
socket.create_connection(("192.0.2.7", 443), 5)
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 5)
print("loopback works")
"""
    done, sought = run_in_trap(tmp_path, sys.executable, "-c", script)
    assert "loopback works" in done.stdout
    assert "192.0.2.7:443" in sought
    assert any(name.startswith("fleet.example.org") for name in sought)


@needs_namespaces
@pytest.mark.system
def test_a_local_deployment_of_a_new_app_needs_and_uses_no_network(tmp_path: Path) -> None:
    """The app as `fedfa flower new` writes it, through `fedfa flower up` with TLS and keys, from start to end."""
    pytest.importorskip("flwr")
    app, out = tmp_path / "app", tmp_path / "run"
    write_app(app)
    up = ["flower", "up", "--app", str(app), "--sites", "2", "--rounds", "2", "--out", str(out)]
    done, sought = run_in_trap(tmp_path, str(COMMANDS / "fedfa"), *up)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sought == []
    assert "after 2 rounds" in done.stdout
    assert json.loads((out / "summary.json").read_text())["final_accuracy"] > 0.5


@needs_namespaces
@pytest.mark.slow
def test_without_the_variables_flower_does_use_the_network(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    pytest.importorskip("flwr")
    loud = {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "1", "FLWR_DISABLE_UPDATE_CHECK": "0"}
    command = ["timeout", "60", str(COMMANDS / "flower-superlink"), "--insecure", "--port", "8123"]
    _, sought = run_in_trap(tmp_path, *command, environment=loud)
    assert any("flower.ai" in name for name in sought)
