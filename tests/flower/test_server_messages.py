"""What the user needs to know is the last thing that a run prints, after Flower's own page about an exception."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDING = """
from flwr.app import Context, RecordDict
from flwr.supercore.exit import flwr_exit

from fedfa.flower.server_app import make_server_app

try:
    make_server_app()(None, Context(1, 0, {}, RecordDict(), {"federation.quorun": 1.0}))
except Exception:
    flwr_exit(201)  # as Flower's process does
"""


@pytest.mark.system
def test_our_sentence_comes_last() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert any("unhandled exception" in line for line in lines)
    assert "unknown key federation.quorun (did you mean 'quorum'?)" in lines[-1]
