"""The systemd units of the manual."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedfa.flower.environment import NO_TELEMETRY

UNITS = Path(__file__).parents[2] / "docs" / "systemd"


def test_the_units_disable_telemetry() -> None:
    lines = [line for line in (UNITS / "flower.env").read_text().splitlines() if line and not line.startswith("#")]
    assert dict(line.split("=", 1) for line in lines) == NO_TELEMETRY
    for unit in UNITS.glob("*.service"):
        assert "EnvironmentFile=/etc/fedfa/flower.env" in unit.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_units_are_valid() -> None:
    units = sorted(str(path) for path in UNITS.glob("*.service"))
    assert len(units) == 2
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "is not executable: No such file" not in line]
    assert not [line for line in said if "fedfa-" in line], done.stderr


def test_the_manual_contains_the_commands_of_the_units() -> None:
    def in_one_line(text: str) -> str:
        return " ".join(text.replace("\\\n", " ").split())

    manual = in_one_line((UNITS.parent / "flower.md").read_text())
    for unit in UNITS.glob("*.service"):
        command = unit.read_text().split("ExecStart=/opt/fedfa/bin/")[1].split("\nRestart")[0]
        assert in_one_line(command) in manual, unit.name
