"""Whether to train clients one by one or stacked.

Stacking pays for small networks, where starting an operation costs more than its arithmetic, and on a GPU. Whether it
gives the same bits depends on how the processor's libraries multiply matrices, so it is tried: some clients train two
rounds in both ways, and the results are compared bit by bit. With ``"auto"`` an engine stacks only where nothing
differed and it was faster.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedfa.engines.local import LocalEngine
from fedfa.errors import ConfigError, FedfaError
from fedfa.learning.context import LocalTraining
from fedfa.learning.round import ClientStatesInMemory, ServerState, Training
from fedfa.learning.tensors import Tensors, clone, flatten
from fedfa.models.split import SplitModel
from fedfa.stacking.stacked_model import NotStackableError, StackedModel
from fedfa.stacking.support import not_stackable

log = logging.getLogger(__name__)

Execution = Literal["auto", "each", "stacked"]

SMALL = 200_000
"""Number of weights up to which ``"auto"`` tries stacking; above, arithmetic dominates."""
TRIED = 6
"""Clients in the trial."""
WORTH_A_TRIAL = 3.0
"""Average number of clients of equal size in a cohort from which ``"auto"`` tries stacking."""


ROUNDED_ALIKE = {
    "mm", "addmm", "bmm", "baddbmm", "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "clone", "detach",
    "expand", "slice", "select", "squeeze", "unsqueeze", "cat", "stack", "alias", "_to_copy",
    "relu", "relu_", "leaky_relu", "leaky_relu_", "hardtanh", "hardtanh_", "add", "add_", "sub", "sub_", "mul", "mul_",
    "div", "div_", "neg", "abs", "clamp", "clamp_min", "maximum", "minimum", "mean", "sum", "native_group_norm",
    "native_layer_norm",
}  # fmt: skip
"""Operations whose rounding does not depend on a sample's position in the tensor. Others (sigmoid, powers) use scalar
code at the end of a tensor, so that a trial with few clients proves nothing for many."""


@dataclass(frozen=True)
class Trial:
    """The outcome of training some clients in both ways."""

    equal: bool
    """Whether they returned the same bits."""
    difference: float
    """The largest difference between two weights, relative to the largest weight."""
    gain: float
    """Processor time of one by one, divided by that of stacked."""


def choose_execution(
    asked: Execution,
    training: Training,
    engine: LocalEngine,
    state: ServerState,
    local: LocalTraining,
    cohort: int,
    workers: int,
) -> bool:
    """Whether to stack clients, found by a trial from a server state; ``workers`` would otherwise share the work.

    Raises:
        ConfigError: ``"stacked"`` was asked for and cannot be.
    """
    if asked == "each":
        return False
    obstacle = _obstacle(engine, local)
    if asked == "stacked":
        if obstacle is not None:
            raise ConfigError(f'engine.execution = "stacked": {obstacle}; use "auto" or "each"')
        trial = try_out(training, engine, state, local)
        if trial is not None and not trial.equal:
            log.warning(
                "stacked training differs from training one by one in the last digits (by up to %.1e): another order "
                "of adding; results are comparable, but not the same bits",
                trial.difference,
            )
        return True
    if obstacle is not None or not _promising(engine, cohort):
        return False
    try:
        trial = try_out(training, engine, state, local)
    except FedfaError:
        return False  # the training raises it again, with client and round
    return trial is not None and trial.equal and trial.gain > max(1.2, workers)


def _obstacle(engine: LocalEngine, local: LocalTraining) -> str | None:
    """Why these clients cannot be stacked; None if they can."""
    if unsupported := not_stackable(engine.algorithm):
        return f"the component {', '.join(unsupported)} serves one client at a time"
    if local.optimiser != "sgd":
        return f"local.optimiser = {local.optimiser!r} trains one client at a time"
    if local.precision != "float32":
        return f"it computes in float32, not in {local.precision}"
    if engine.federation.augmentation is not None:
        return "augmentation draws for one client at a time"
    if engine.federation.standardise == "client":
        return "every client standardises its inputs with statistics of its own"
    example = engine.model.example
    if example is not None and not (isinstance(example, Tensor) and example.is_floating_point()):
        return "it takes inputs of one float tensor"
    try:
        StackedModel(engine.model, 2)
    except NotStackableError as error:
        return str(error)
    return None


def _promising(engine: LocalEngine, cohort: int) -> bool:
    """Whether a trial may be worth its time."""
    sizes = engine.federation.partition.sizes
    _, counts = np.unique(sizes[sizes > 0], return_counts=True)
    alike = 1 + (cohort - 1) * float(((counts / counts.sum()) ** 2).sum())
    state = engine.model.state()
    images = any(value.dim() > 2 for value in state.values())  # convolutions
    small = sum(value.numel() for value in state.values()) <= SMALL and not images
    return alike >= WORTH_A_TRIAL and (engine.device.type != "cpu" or (small and _rounds_alike(engine.model)))


class _Operations(TorchDispatchMode):
    """Records the names of the operations that run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import torch's compiler first, for more than a second

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _rounds_alike(model: SplitModel) -> bool:
    """Whether the rounding of no operation of the network depends on a sample's position."""
    with _Operations() as operations:
        tried = model.try_out()
    return tried is not None and operations.names <= ROUNDED_ALIKE


def try_out(training: Training, engine: LocalEngine, state: ServerState, local: LocalTraining) -> Trial | None:
    """Train two rounds of one epoch in both ways; None if no two clients have the same size."""
    sizes = engine.federation.partition.sizes
    values, counts = np.unique(sizes[sizes > 0], return_counts=True)
    if not len(values) or counts.max() < 2:
        return None
    clients = [int(c) for c in np.flatnonzero(sizes == values[counts.argmax()])[:TRIED]]
    local = local.model_copy(update={"epochs": 1})
    before, weights = engine.stacked, clone(engine.model.state())
    try:
        seconds, ends = {}, {}
        for engine.stacked in (False, True):
            _two_rounds(training, engine, state, local, clients)  # warm-up
            started = time.process_time()
            ends[engine.stacked] = _two_rounds(training, engine, state, local, clients)
            seconds[engine.stacked] = time.process_time() - started
    finally:
        engine.stacked = before
        engine.model.load(weights)
    largest = max((float(v.abs().max()) for v in ends[False].values() if v.numel()), default=0.0) or 1.0
    different = [(ends[True][name].double() - value.double()).abs().max() for name, value in ends[False].items()]
    equal = all(torch.equal(ends[True][name], value) for name, value in ends[False].items())
    return Trial(equal, float(max(different)) / largest, seconds[False] / max(seconds[True], 1e-9))


def _two_rounds(
    training: Training, engine: LocalEngine, state: ServerState, local: LocalTraining, clients: list[int]
) -> Tensors:
    """The server state and all client states after two rounds."""
    states = ClientStatesInMemory()
    for _ in range(2):
        state, _ = training.apply(state, clients, local, engine.train, states)
    own = {f"{client}/{name}": value for client, nested in states.items() for name, value in flatten(nested).items()}
    return {**state.to_tensors(), **own}
