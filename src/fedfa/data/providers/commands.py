"""Running the package managers' own clients."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from fedfa.data.known import Unavailable


def run(*command: str, folder: Path, seconds: int) -> str:
    """Run a command in a folder and return what it printed.

    Raises:
        Unavailable: There is no such command, it failed or it took too long; says which, with its last words.
    """
    program = shutil.which(command[0])
    if program is None:
        raise Unavailable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} did not finish within {seconds} s") from error
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {_last_words(done.stderr or done.stdout)}")
    return done.stdout


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = ("E:", "npm error code", "npm ERR! code", "npm error network")
    telling = [line for line in lines if line.startswith(marks)]
    return "; ".join((telling or lines or ["it said nothing"])[:2])
