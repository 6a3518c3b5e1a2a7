"""A method whose clients fail during training where a file in a directory asks for it.

A request is an empty file ``ROUND-CLIENT-WHAT-NUMBER`` in the directory FEDFA_TROUBLE. It is deleted before the
failure: each file causes one.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext


class Troubled(Component):
    """Federated averaging with failures."""

    name = "troubled"

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        if ctx.steps != 2 or "FEDFA_TROUBLE" not in os.environ:
            return
        folder = Path(os.environ["FEDFA_TROUBLE"])
        for note in sorted(folder.glob(f"{ctx.round}-{ctx.client}-*")):
            what = note.name.split("-")[2]
            note.unlink()
            if what == "raise":
                raise ValueError(f"client {ctx.client} does not feel well")
            if what == "exit":
                os._exit(3)
            if what == "sleep":
                (folder / f"asleep-{os.getpid()}").touch()
                time.sleep(120)
            if what == "print":
                print("a word from client", ctx.client)  # noqa: T201  # the test is about it
            if what == "burn":
                until = time.process_time() + 0.2
                while time.process_time() < until:
                    pass
            if what.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[what])
                time.sleep(10)
            return
