"""Real federations: the same parts, local loop and server step, carried by Flower between sites.

An app of one's own is two functions (``load_data``, ``make_model``) and two lines::

    client = make_client_app(load_data, make_model)
    server = make_server_app(make_model)

Nothing here is imported before it is needed: Flower starts a new process for every message.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfa.flower.client_app import make_client_app
    from fedfa.flower.server_app import make_server_app

__all__ = ["app_folder", "make_client_app", "make_server_app"]

_PLACES = {"make_client_app": "fedfa.flower.client_app", "make_server_app": "fedfa.flower.server_app"}


def app_folder() -> Path:
    """The app that works as it is with ``flwr run``: known data sets, networks and methods, chosen in its config."""
    return Path(__file__).parent / "app"


def __getattr__(name: str) -> object:
    """Import on first use."""
    import importlib

    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fedfa.flower' has no attribute {name!r}")
