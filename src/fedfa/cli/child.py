"""``python -m fedfa.cli.child ARGUMENTS``: the command line as a child process that ends when its parent does.

The parent holds the other end of this process' standard input and never writes. When the parent ends, in whatever way,
the system closes that end; then this process asks itself to stop, as Ctrl-C would, and what is done is saved.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

GRACE_SECONDS = 30.0


def end_with_parent() -> None:
    """Watch standard input from a thread; at its end, stop this process."""

    def watch() -> None:
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(143)  # it is stuck

    descriptor = sys.stdin.fileno()
    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    from fedfa.cli import main

    main()
