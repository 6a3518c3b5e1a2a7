"""No calls home: the variables that keep Flower's and its companions' processes from using the network on their own.

Flower reads some of them when it is imported, so a process must have them before that: start processes with
:func:`quiet`, and import this module before ``flwr``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

QUIET: dict[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Usage statistics, the daily look for updates, and installing what an app lists from a package index."""


def quiet(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment for a process that shall call nobody.

    Args:
        base: The environment to start from; left out, this process' own.

    Example:
        >>> quiet({"HOME": "/home/ada"})["FLWR_TELEMETRY_ENABLED"]
        '0'
    """
    return {**(os.environ if base is None else base), **QUIET}


def hush() -> None:
    """The same for this process, unless its owner decided otherwise. Call it before Flower is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
