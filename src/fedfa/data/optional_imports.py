"""Packages that only some data sets need."""

from __future__ import annotations

import importlib
from types import ModuleType

from fedfa.errors import DataError


def import_optional(module: str, what: str, extra: str = "data") -> ModuleType:
    """Import an optional package, or explain what needs it and how to install it.

    Args:
        module: Module to import, e.g. ``"PIL.Image"``.
        what: What it is needed for.
        extra: The extra of fedfa that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        package = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(package, package)
        raise DataError(f"{what} needs {package}; install it with: pip install 'fedfa[{extra}]'") from error
