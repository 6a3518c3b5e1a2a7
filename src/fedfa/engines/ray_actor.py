"""What runs on a cluster's nodes: an actor that trains clients, and how it gets what it works with.

**Data are placed once per node.** The engine's whole content is one object of Ray's store. Samples and the split lie in
it as plain arrays, and all actors of a node read the same memory. Everything else (network, method) is the actor's own.

**Code of your own travels with it**: networks and methods from a script, a notebook or a file of yours need not be
installed on the nodes. What is installed (fedfa, torch, any package) must be, in the same version.
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
from torch import Tensor

from fedfa.data import Federation, Samples
from fedfa.data.partitions import Partition
from fedfa.engines.local import LocalEngine
from fedfa.engines.shared_tensors import Layout, pack, unpack
from fedfa.engines.worker import Message, carry_out, describe_error

Parcel = tuple[Message, Layout, "np.ndarray[Any, Any]"]
"""How things travel: plain values, and tensors as one array of bytes with its layout. Ray maps such arrays."""


def parcel(values: Message, tensors: Any) -> Parcel:
    """Make a parcel."""
    memory, layout = pack(tensors)
    return values, layout, memory.numpy()


def opened(content: Parcel) -> tuple[Message, dict[str, Any]]:
    """The content of a parcel. The tensors are the receiver's own: the store's memory belongs to all."""
    values, layout, memory = content
    return values, unpack(torch.from_numpy(memory.copy()), layout)


class Actor:
    """Trains clients with one torch thread.

    Args:
        local: Does the work.
    """

    def __init__(self, local: LocalEngine) -> None:
        torch.set_num_threads(1)
        self._local = local
        self._told = -1
        self._sent: tuple[Message, dict[str, Any]] = {}, {}

    def report(self) -> Message:
        """What the main process should know of this one."""
        return {"processor": torch.backends.cpu.get_cpu_capability()}

    def work(self, number: int, sent: Parcel, request: Message, own: Parcel) -> tuple[Message | None, Parcel]:
        """Carry out a request.

        Args:
            number: Of the broadcast.
            sent: The broadcast.
            request: What is asked for.
            own: What comes with the request.

        Returns:
            What went wrong, or None; and the answer.
        """
        try:
            if number != self._told:
                self._sent, self._told = opened(sent), number
            answer = carry_out(self._local, request, *self._sent, opened(own)[1])
            return None, parcel(*answer)
        except Exception as error:
            return describe_error(error), parcel({}, {})


# -- placing ----------------------------------------------------------------------------------------------------------
def place(ray: Any, local: LocalEngine) -> Any:
    """Put an engine into the store; a reference to it."""
    with _as_arrays(ray), _own_code_travels(ray):
        return ray.put(local)


@contextmanager
def _as_arrays(ray: Any) -> Iterator[None]:
    """Samples and splits go as arrays, which the store hands out without a copy."""
    ray.util.register_serializer(Samples, serializer=_arrays_of, deserializer=_samples_of)
    ray.util.register_serializer(Federation, serializer=_pieces_of, deserializer=_federation_of)
    try:
        yield
    finally:
        ray.util.deregister_serializer(Samples)
        ray.util.deregister_serializer(Federation)


def _arrays_of(samples: Samples) -> dict[str, Any]:
    named = {name: getattr(samples, name) for name in ("inputs", "labels", "domains", "writers")}
    return {name: None if value is None else value.contiguous().numpy() for name, value in named.items()}


def _samples_of(arrays: dict[str, Any]) -> Samples:
    views: dict[str, Any] = {name: None if array is None else _view(array) for name, array in arrays.items()}
    return Samples(**views)


def _pieces_of(federation: Federation) -> tuple[Any, ...]:
    return federation.dataset, federation.partition.order, federation.partition.offsets


def _federation_of(pieces: tuple[Any, ...]) -> Federation:
    dataset, order, offsets = pieces
    with _reading_only():
        return Federation(dataset, Partition(order, offsets))


def _view(array: np.ndarray[Any, Any]) -> Tensor:
    with _reading_only():
        return torch.from_numpy(array)


@contextmanager
def _reading_only() -> Iterator[None]:
    """The store's arrays cannot be written to. Torch does not know such tensors, and warns; nothing writes to data."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        yield


@contextmanager
def _own_code_travels(ray: Any) -> Iterator[None]:
    """What comes from modules that are not installed is sent as code, not as a name to import."""
    installed = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    chosen = [module for module in list(sys.modules.values()) if _is_own(module, installed)]
    for module in chosen:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in chosen:
            ray.cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: ModuleType, installed: tuple[str, ...]) -> bool:
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if not file or name == "__main__" or name.partition(".")[0] in ("fedfa", "ray"):
        return False
    return sys.modules.get(name) is module and not file.startswith(installed)
