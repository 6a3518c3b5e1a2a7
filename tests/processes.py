"""What the tests ask about processes that are not theirs to wait for."""

import os
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process still does something; one that is dead and nobody has waited for yet does not."""
    if not Path("/proc/self").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or between that and its reading
        return False
    return state not in "ZX"
