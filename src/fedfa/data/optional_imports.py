"""Packages that only some data sets need."""

from __future__ import annotations

import importlib
from types import ModuleType

from fedfa.errors import DataError


def import_optional(module: str, what: str, extra: str = "data") -> ModuleType:
    """Import a module such as ``"PIL.Image"``, or explain what needs it and which extra of fedfa installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        package = "pillow" if package == "PIL" else package
        raise DataError(f"{what} needs {package}; install it with: pip install 'fedfa[{extra}]'") from error
