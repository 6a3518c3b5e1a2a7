"""Random streams keyed by what they are for.

Every draw in the project comes from a stream named by ``(seed, purpose, ids…)``, for example
``stream(1, "shuffle", round, client)``. No stream depends on how many others were drawn before it, so the
result does not depend on the number of workers, on the order of the clients or on whether a run was
interrupted, and there is no generator state to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """The generator for one purpose.

    Args:
        seed: The seed of the run (or of the data split).
        purpose: What the numbers are for, e.g. ``"shuffle"``. Different purposes are independent.
        *ids: Anything that tells streams of one purpose apart, e.g. round and client.

    Example:
        >>> stream(1, "shuffle", 3, 17).permutation(4).tolist()
        [0, 2, 1, 3]
        >>> stream(1, "shuffle", 3, 17).permutation(4).tolist()
        [0, 2, 1, 3]
    """
    key = hashlib.blake2b(repr((int(seed), purpose, tuple(int(i) for i in ids))).encode(), digest_size=16).digest()
    # The key as a number would seed the same stream; numpy takes three times as long to take it apart.
    return np.random.Generator(np.random.PCG64(np.frombuffer(key, dtype="<u4").astype(np.uint32)))


@contextmanager
def torch_stream(seed: int, purpose: str, *ids: int, device: torch.device | None = None) -> Iterator[None]:
    """Give code that draws from torch's global generators (initialisers, dropout) a stream of its own.

    The generator of the CPU and, if one is named, that of the device are seeded, and put back afterwards where torch
    can do that (CPU and CUDA), so nothing outside notices. Other devices are left alone.
    """
    draws = int(stream(seed, purpose, *ids).integers(2**63))
    kind = "cpu" if device is None else device.type
    with torch.random.fork_rng(devices=[device] if device is not None and kind == "cuda" else []):
        torch.default_generator.manual_seed(draws)
        if kind == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(draws)
        elif kind == "mps":
            torch.mps.manual_seed(draws)
        yield
