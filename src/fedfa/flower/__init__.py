"""Real federations: the same components, local loop and server step, with Flower as transport between sites.

A custom app is two functions (``load_data``, ``make_model``) and two lines::

    client = make_client_app(load_data, make_model)
    server = make_server_app(make_model)

Imports are lazy, because Flower starts a new process for every message.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfa.flower.client_app import make_client_app
    from fedfa.flower.server_app import make_server_app

__all__ = ["app_folder", "make_client_app", "make_server_app"]

_MODULES = {"make_client_app": "fedfa.flower.client_app", "make_server_app": "fedfa.flower.server_app"}


def app_folder() -> Path:
    """Directory of the built-in app for ``flwr run``: its config selects data set, network and algorithm."""
    return Path(__file__).parent / "app"


def __getattr__(name: str) -> object:
    """Import on first use."""
    import importlib

    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'fedfa.flower' has no attribute {name!r}")
