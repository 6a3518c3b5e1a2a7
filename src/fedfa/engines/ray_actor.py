"""Actor on a cluster's node that trains clients, and the transfer of its engine.

**Data are stored once per node.** The engine is one object of Ray's store. Samples and partition are plain arrays in
it, and all actors of a node read the same memory. Everything else (network, components) is the actor's own.

**Custom code is sent along**: networks and components from a script, a notebook or a file need not be installed on the
nodes. Installed packages (fedfa, torch, any other) must be, in the same version.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedfa.data import Federation, Partition, Samples
from fedfa.engines.local import LocalEngine
from fedfa.engines.shared_tensors import Layout, pack, unpack
from fedfa.engines.worker_process import Message, encode_error, execute

Packed = tuple[Message, Layout, "np.ndarray[Any, Any]"]
"""Plain values, and tensors as one array of bytes with its layout. Ray maps such arrays."""


def pack_message(values: Message, tensors: Any) -> Packed:
    """Pack values and tensors."""
    memory, layout = pack(tensors)
    return values, layout, memory.numpy()


def unpack_message(packed: Packed) -> tuple[Message, dict[str, Any]]:
    """Unpack values and tensors. The tensors are a copy, because the store's memory is shared."""
    values, layout, memory = packed
    return values, unpack(torch.from_numpy(memory.copy()), layout)


class ClientActor:
    """Trains clients with one torch thread."""

    def __init__(self, local: LocalEngine) -> None:
        torch.set_num_threads(1)
        self._local = local
        self._number = -1
        self._broadcast: tuple[Message, dict[str, Any]] = {}, {}

    def report(self) -> Message:
        """Properties of this process that the main process checks."""
        return {"processor": torch.backends.cpu.get_cpu_capability()}

    def work(self, number: int, broadcast: Packed, request: Message, own: Packed) -> tuple[Message | None, Packed]:
        """Execute a request.

        Returns:
            An encoded error or None, and the reply.
        """
        try:
            if number != self._number:
                self._broadcast, self._number = unpack_message(broadcast), number
            return None, pack_message(*execute(self._local, request, *self._broadcast, unpack_message(own)[1]))
        except Exception as error:
            return encode_error(error), pack_message({}, {})


# -- transfer of the engine -------------------------------------------------------------------------------------------
def put_engine(ray: Any, local: LocalEngine) -> Any:
    """Put an engine into Ray's store; return a reference."""
    with _as_arrays(ray), _code_by_value(ray):
        return ray.put(local)


@contextmanager
def _as_arrays(ray: Any) -> Iterator[None]:
    """Serialise samples and partitions as arrays, which the store hands out without a copy."""
    ray.util.register_serializer(Samples, serializer=_from_samples, deserializer=_to_samples)
    ray.util.register_serializer(Federation, serializer=_from_federation, deserializer=_to_federation)
    try:
        yield
    finally:
        ray.util.deregister_serializer(Samples)
        ray.util.deregister_serializer(Federation)


def _from_samples(samples: Samples) -> dict[str, Any]:
    named = {name: getattr(samples, name) for name in ("inputs", "labels", "domains", "writers")}
    return {name: None if value is None else value.contiguous().numpy() for name, value in named.items()}


def _to_samples(arrays: dict[str, Any]) -> Samples:
    with _read_only_arrays():
        views: dict[str, Any] = {
            name: None if array is None else torch.from_numpy(array) for name, array in arrays.items()
        }
    return Samples(**views)


def _from_federation(federation: Federation) -> tuple[Any, ...]:
    return federation.dataset, federation.partition.order, federation.partition.offsets, federation.validation


def _to_federation(content: tuple[Any, ...]) -> Federation:
    dataset, order, offsets, validation = content
    with _read_only_arrays():
        return Federation(dataset, Partition(order, offsets), validation=validation)


@contextmanager
def _read_only_arrays() -> Iterator[None]:
    """Silence torch's warning about read-only arrays: the store's are, and nothing writes to data."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        yield


@contextmanager
def _code_by_value(ray: Any) -> Iterator[None]:
    """Send the code of modules that are not installed, in place of their names."""
    installed = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    chosen = [module for module in list(sys.modules.values()) if _is_custom(module, installed)]
    for module in chosen:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in chosen:
            ray.cloudpickle.unregister_pickle_by_value(module)


def _is_custom(module: ModuleType, installed: tuple[str, ...]) -> bool:
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if not file or name == "__main__" or name.partition(".")[0] in ("fedfa", "ray"):
        return False
    return sys.modules.get(name) is module and not file.startswith(installed)
