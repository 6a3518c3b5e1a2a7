"""Environment variables that keep Flower and its dependencies from using the network on their own.

Flower reads some of them at import time: start processes with :func:`without_telemetry`, and call
:func:`disable_telemetry` before importing ``flwr``.
"""

from __future__ import annotations

import os

NO_TELEMETRY: dict[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Disables usage statistics, the daily update check, and installing an app's dependencies from a package index."""


def without_telemetry() -> dict[str, str]:
    """Environment for a child process: that of this process, without telemetry.

    Example:
        >>> without_telemetry()["FLWR_TELEMETRY_ENABLED"]
        '0'
    """
    return {**os.environ, **NO_TELEMETRY}


def disable_telemetry() -> None:
    """Disable telemetry in this process, except for variables that the user has set."""
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)
