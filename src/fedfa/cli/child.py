"""``python -m fedfa.cli.child ARGUMENTS``: the command line as a child process that ends when its parent does.

The parent holds the other end of standard input and never writes. However the parent ends, the system closes that end;
this process then stops as after Ctrl-C, which saves what is done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

GRACE_SECONDS = 30.0


def end_with_parent() -> None:
    """Stop this process at the end of its standard input, which a thread watches."""

    def watch() -> None:
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(143)  # it did not stop in time

    descriptor = sys.stdin.fileno()
    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    from fedfa.cli import main

    main()
