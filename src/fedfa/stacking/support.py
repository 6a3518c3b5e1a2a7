"""Which components can be stacked.

Stacked, the hooks that run per batch and per epoch see tensors with a leading client axis, and so does what ``begin``
put into ``ctx.scratch``. Hooks that reduce over trailing axes only (``.sum(-1)``, ``.mean(-1)``, ``product``) serve
both forms. They may read and change ``ctx.scratch`` (tensors only, made anew and no views of the network),
``ctx.parameters`` and ``ctx.model``, and read ``ctx.broadcast``, ``ctx.label_counts`` and counters; nothing else of the
context, and no ``batch.outputs``.

The components below are written and tested that way. A component of your own joins them with :func:`stackable`.
"""

from __future__ import annotations

from typing import TypeVar

from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component, overridden

STACKED_HOOKS = ("logits", "loss", "gradient", "after_step", "after_epoch")
"""Hooks that see several clients at once."""

_STACKABLE: set[str] = {
    f"fedfa.algorithms.{name}"
    for name in (
        "fedfa.Anchors", "fedfa.Calibration", "fedprox.FedProx", "feddyn.FedDyn", "scaffold.Scaffold",
        "fednova.FedNova", "moon.MOON", "fedproto.FedProto", "fedproc.FedProc", "fedlc.FedLC",
        "fedntd.FedNTD", "fedrs.FedRS", "fedacg.FedACG", "fedetf.FedETF", "fedfac.TiedAnchors",
    )
}  # fmt: skip
_CONTRIBUTES_UPDATE: set[str] = {"fedfa.algorithms.fedavg.FedAvg"}
"""Components whose ``contribute`` reads ``ctx.update`` and counters but not the trained network, which then need not be
copied back for each client."""

KindT = TypeVar("KindT", bound=type[Component])


def stackable(kind: KindT) -> KindT:
    """Declare that the hooks of a component work with a leading client axis; a class decorator.

    It holds for this class, not for its subclasses, whose hooks may differ.
    """
    _STACKABLE.add(_path(kind))
    return kind


def not_stackable(algorithm: Algorithm) -> list[str]:
    """Names of the components that can only serve one client at a time."""
    return [
        component.name
        for component in algorithm.enabled
        if any(overridden(component, hook) for hook in STACKED_HOOKS)
        and (_path(type(component)) not in _STACKABLE or component.outputs)
    ]


def reads_trained_model(algorithm: Algorithm) -> bool:
    """Whether a component may read a client's network after its training."""
    contributing = (hook.__self__ for hook in algorithm.hooks("contribute"))  # type: ignore[attr-defined]  # bound methods
    return any(_path(type(component)) not in _CONTRIBUTES_UPDATE for component in contributing)


def _path(kind: type[Component]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
