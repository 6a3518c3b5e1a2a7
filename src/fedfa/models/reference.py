"""The user's own networks by reference: ``FILE.py:NAME``, ``package.module:NAME`` or ``__main__:NAME``."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedfa.error_messages import nearest
from fedfa.errors import ModelError

_FILE_MODULE = "fedfa_network_"
_FILES: dict[tuple[Path, int], ModuleType] = {}
"""Imported files by path and modification time, so that an edited file is imported again."""


def load_network(reference: str) -> Callable[..., nn.Module]:
    """Find the maker of a network.

    Args:
        reference: ``FILE.py:NAME`` (relative to the current directory), ``package.module:NAME`` or ``__main__:NAME``.
            NAME is a subclass of ``nn.Module`` or a function that returns a network, without required arguments.

    Returns:
        The class, or a function that also checks its result. Calling it makes a new network.

    Raises:
        ModelError: There is no such file, module or name, or it does not make a network.

    Example:
        >>> load_network("torch.nn:Identity")()
        Identity()
    """
    maker, name = referenced(reference), reference.rpartition(":")[2]
    is_class = isinstance(maker, type) and issubclass(maker, nn.Module)
    if not is_class and not inspect.isroutine(maker):
        kind = f"the class {name}" if isinstance(maker, type) else f"of type {type(maker).__name__}"
        raise ModelError(f"{reference} is {kind}; name a subclass of nn.Module or a function that returns a network")
    required = [
        parameter.name
        for parameter in inspect.signature(maker).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise ModelError(
            f"{reference} needs the arguments {', '.join(required)}; give them default values, or name a function "
            "without required arguments that returns the network"
        )

    @functools.wraps(maker)
    def make(**options: Any) -> nn.Module:
        network = maker(**options)
        if not isinstance(network, nn.Module):
            raise ModelError(f"{reference} returned an object of type {type(network).__name__}, not a network")
        return network

    return maker if is_class else make


def referenced(reference: str, kind: str = "network") -> Any:
    """The object that a reference names; ``kind`` says what it is, for messages.

    Raises:
        ModelError: There is no such file, module or name.
    """
    place, _, name = reference.rpartition(":")
    found: Any = _module(place)
    for step in name.split("."):
        if not hasattr(found, step):
            if place == "__main__":
                raise ModelError(
                    f"the {kind} {name!r} was defined in the script or notebook that trained the run; define it here "
                    f"too, or pass it: {'model' if kind == 'network' else kind + 's'}=…"
                )
            names = [known for known in vars(found) if not known.startswith("_")]
            raise ModelError(
                f"{place} has no {name!r}{nearest(step, names)}; it defines {', '.join(names) or 'nothing'}"
            )
        found = getattr(found, step)
    return found


def build_network(reference: str, options: Mapping[str, Any]) -> nn.Module:
    """Make a network of one's own, with options as keyword arguments.

    Raises:
        ModelError: See :func:`load_network`; or it does not accept the options, or fails.
    """
    make = load_network(reference)
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ModelError(
            f"{reference} does not accept model.options = {dict(options)}: {error}; remove them, "
            "on the command line with --set model.options={}"
        ) from None
    try:
        return make(**options)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{reference} failed: {_described(error)}") from error


def network_reference(maker: object) -> str | None:
    """The reference by which :func:`load_network` finds a class or function again.

    None for what has no name in a module, such as lambdas, nested functions and instances.

    Example:
        >>> network_reference(nn.Identity), network_reference(lambda: nn.Identity())
        ('torch.nn.modules.linear:Identity', None)
    """
    if not isinstance(maker, type) and not inspect.isfunction(maker):
        return None
    try:
        module = sys.modules[maker.__module__]
        if operator.attrgetter(maker.__qualname__)(module) is not maker:
            return None
    except (KeyError, AttributeError):
        return None
    place = module.__name__  # of a script "__main__": importing its file would run the training again
    if place.startswith(_FILE_MODULE):
        place = str(Path(module.__file__ or "").resolve())
    return f"{place}:{maker.__qualname__}"


def _module(place: str) -> ModuleType:
    main = sys.modules["__main__"]
    if place == "__main__" or (main.__spec__ is not None and main.__spec__.name == place):
        return main
    if place.endswith(".py"):
        return _from_file(Path(place).expanduser().resolve(), main)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise _import_error(place, error) from error
        raise ModelError(f"no module {place!r}; give FILE.py:NAME or the name of an installed module") from None
    except Exception as error:
        raise _import_error(place, error) from error


def _from_file(path: Path, main: ModuleType) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"no file {path}; give FILE.py:NAME, relative to the current directory")
    script = getattr(main, "__file__", None)
    if script is not None and Path(script).resolve() == path:
        return main  # importing it would run the script again
    key = (path, path.stat().st_mtime_ns)
    if key not in _FILES:
        unique = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
        spec = importlib.util.spec_from_file_location(f"{_FILE_MODULE}{path.stem}_{unique}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # dataclasses look their module up while it is being imported
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module.__name__]
            raise _import_error(str(path), error) from error
        _FILES[key] = module
    return _FILES[key]


def _import_error(place: str, error: Exception) -> ModelError:
    return ModelError(f"{place} cannot be imported: {_described(error, place)}")


def _described(error: Exception, file: str = "") -> str:
    """The error with its file and line; the innermost line of ``file``, where that is part of the traceback."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
