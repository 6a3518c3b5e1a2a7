"""``python -m fedfa.cli.child``: the command line as a warm child process that runs one command after the other.

The parent writes a request per command to this process's standard input, a line of JSON: the arguments, environment
variables, and the file for its output. After a command that succeeded this process writes an empty line to its standard
output and waits for the next one; a command that failed ends it with that exit code, so that nothing of it is left for
the next.

However the parent ends, the system closes its end of the standard input; this process then stops as after Ctrl-C, which
saves what is done.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time

GRACE_SECONDS = 30.0


def requests() -> queue.Queue[bytes]:
    """The lines of the standard input, which a thread reads; its end stops this process."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        with os.fdopen(os.dup(0), "rb") as source:
            for line in source:
                lines.put(line)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(143)  # it did not stop in time

    threading.Thread(target=read, name="read-requests", daemon=True).start()
    return lines


def execute(request: bytes) -> int:
    """Run one command with its output in a file; its exit code."""
    from fedfa.algorithms import registry
    from fedfa.cli import main

    asked = json.loads(request)
    os.environ.update(asked["environment"])
    sys.argv = ["fedfa", *asked["arguments"]]
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    known = dict(registry._METHODS)
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        # Methods of one command's own files are not known to the next.
        registry._METHODS.clear()
        registry._METHODS.update(known)
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def serve() -> None:
    """Run commands until one fails or the parent is gone."""
    replies = os.dup(1)
    lines = requests()
    import fedfa.experiment.run  # noqa: F401 - while nothing is asked for yet

    try:
        while True:
            if code := execute(lines.get()):
                sys.exit(code)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.write(replies, b"\n")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    serve()
