"""Install torch before everything else: its CPU build where no NVIDIA card is present, which is a fifth of the size.

The CPU build has the version ``X+cpu``. It is taken from wherever pip looks, and from ``TORCH_INDEX`` if it is set (an
address; torch's installation page names it for the CPU). Where neither has it, the usual build is installed.
Uses the standard library only: it runs in an environment that is still empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def wanted_version(constraints: str) -> str:
    r"""The version of torch that a constraints file names.

    Example:
        >>> wanted_version("numpy==2.4.6\ntorch==2.13.0\n")
        '2.13.0'
    """
    found = re.search(r"(?m)^torch==(\S+)", constraints)
    if found is None:
        raise SystemExit("constraints.txt names no version of torch")
    return found[1]


def has_nvidia_card() -> bool:
    """Whether a driver for an NVIDIA card is loaded, or its tools are installed."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def attempts(version: str, platform: str, card: bool, index: str | None) -> list[list[str]]:
    """Arguments of ``pip install``, to be tried in order.

    Only Linux has two builds; elsewhere the usual one has no CUDA.

    Example:
        >>> attempts("2.13.0", "linux", False, None)
        [['torch==2.13.0+cpu'], ['torch==2.13.0']]
        >>> attempts("2.13.0", "darwin", False, None)
        [['torch==2.13.0']]
    """
    usual = [f"torch=={version}"]
    if platform != "linux" or card:
        return [usual]
    light = [f"torch=={version}+cpu"]
    return [[*light, "--extra-index-url", index], usual] if index else [light, usual]


def installed() -> str | None:
    """The installed version; None if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; links do not count."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def describe(version: str, card: bool, size: int) -> str:
    """What was installed, in a line.

    Example:
        >>> describe("2.13.0+cpu", False, 920_000_000)
        'torch 2.13.0+cpu: the CPU build, as no NVIDIA card is present; 0.9 GB so far'
    """
    if version.endswith("+cpu"):
        which = "the CPU build, as no NVIDIA card is present"
    elif card or sys.platform != "linux":
        which = "the usual build"
    else:
        which = (
            "the usual build, with CUDA libraries that this machine does not use (the CPU build was not found; "
            "TORCH_INDEX=ADDRESS names an index that has it)"
        )
    return f"torch {version}: {which}; {size / 1e9:.1f} GB so far"


def main(pip: Sequence[str] = (sys.executable, "-m", "pip", "install", "--quiet"), options: Sequence[str] = ()) -> None:
    """Install torch unless the wanted version is there, and report which build it is and how large.

    Args:
        pip: The command that installs.
        options: Further options for it.
    """
    version, card = wanted_version(CONSTRAINTS.read_text(encoding="utf-8")), has_nvidia_card()
    if (installed() or "").partition("+")[0] != version:
        choices = attempts(version, sys.platform, card, os.environ.get("TORCH_INDEX") or None)
        for place, arguments in enumerate(choices):
            last = place == len(choices) - 1
            done = subprocess.run(
                [*pip, *options, *arguments], check=False, stderr=None if last else subprocess.DEVNULL
            )
            if done.returncode == 0:
                break
        else:
            raise SystemExit("torch could not be installed; see the messages of pip above")
    size = size_of(Path(sysconfig.get_paths()["purelib"]))
    print(describe(installed() or version, card, size))


if __name__ == "__main__":
    main(options=sys.argv[1:])
