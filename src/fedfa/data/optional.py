"""Packages that only some data sets need."""

from __future__ import annotations

import importlib
from types import ModuleType

from fedfa.errors import DataError


def needs(module: str, what: str, extra: str = "data") -> ModuleType:
    """Import an optional package, or say what needs it and how to install it.

    Args:
        module: What to import, e.g. ``"PIL.Image"``.
        what: What it is needed for.
        extra: The extra of fedfa that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(module.split(".")[0], module.split(".")[0])
        raise DataError(f"{what} needs {package}; install it with: pip install 'fedfa[{extra}]'") from error
