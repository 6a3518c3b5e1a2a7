"""Whether clients train one by one or side by side (:mod:`fedfa.learning.stacking`).

Side by side pays for small networks, where starting an operation costs more than its arithmetic, and on a GPU. Whether
it gives the same bits depends on how the processor's libraries multiply matrices, so it is not assumed but tried: the
first clients train two rounds in both ways, and what they return is compared bit by bit. Left to itself, an engine
stacks only where nothing differed and it was faster.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedfa.engines.local import LocalEngine
from fedfa.errors import FedfaError, SettingsError
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.server import ServerState, finish_round
from fedfa.learning.sums import Total
from fedfa.learning.tensors import PartTensors, Tensors, clone, flatten
from fedfa.models.split import SplitModel
from fedfa.models.stacked import NotStackableError, StackedModel

log = logging.getLogger(__name__)

Execution = Literal["auto", "each", "stacked"]

SMALL = 200_000
"""Weights of a network up to which stacking is tried without being asked for; above, arithmetic is the cost."""
TRIED = 6
"""Clients in the trial."""
WORTH_A_TRIAL = 3.0
"""How many of a cohort's clients must have the same size on average, for stacking to be tried without being asked."""


ROUNDED_ALIKE = {
    "mm", "addmm", "bmm", "baddbmm", "t", "transpose", "permute", "view", "_unsafe_view", "reshape", "clone", "detach",
    "expand", "slice", "select", "squeeze", "unsqueeze", "cat", "stack", "alias", "_to_copy",
    "relu", "relu_", "leaky_relu", "leaky_relu_", "hardtanh", "hardtanh_", "add", "add_", "sub", "sub_", "mul", "mul_",
    "div", "div_", "neg", "abs", "clamp", "clamp_min", "maximum", "minimum", "mean", "sum", "native_group_norm",
    "native_layer_norm",
}  # fmt: skip
"""Operations that give a sample the same last digit wherever it stands. Others (sigmoid, powers) a processor computes
otherwise at the end of a tensor than in its middle, so a trial with few clients proves nothing for many."""


@dataclass(frozen=True)
class Trial:
    """Some clients trained in both ways."""

    equal: bool
    """Whether they returned the same bits."""
    difference: float
    """The largest difference between two weights, relative to the largest weight."""
    gain: float
    """Processor time of one by one, divided by that of side by side."""


def choose_execution(
    asked: Execution, engine: LocalEngine, state: ServerState, plan: RoundPlan, cohort: int, workers: int
) -> bool:
    """Whether clients shall train side by side.

    Args:
        asked: The setting.
        engine: Trains in this process.
        state: The server before the trial.
        plan: What would be sent.
        cohort: Clients in a round.
        workers: Processes that would share the work one by one.

    Raises:
        SettingsError: ``"stacked"`` was asked for and cannot be.
    """
    if asked == "each":
        return False
    obstacle = _obstacle(engine, plan)
    if asked == "stacked":
        if obstacle is not None:
            raise SettingsError(f'engine.execution = "stacked": {obstacle}; use "auto" or "each"')
        trial = try_out(engine, state, plan)
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
        trial = try_out(engine, state, plan)
    except FedfaError:
        return False  # the training will meet it too, and say where
    return trial is not None and trial.equal and trial.gain > max(1.2, workers)


def _obstacle(engine: LocalEngine, plan: RoundPlan) -> str | None:
    """Why these clients cannot be stacked; None if they can."""
    if engine.recipe.not_stacking:
        return f"the method's part {', '.join(engine.recipe.not_stacking)} serves one client at a time"
    if plan.local.precision != "float32":
        return f"it computes in float32, not in {plan.local.precision}"
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
    """Notes the names of the operations that run."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep torch's compiler out, torch would load it, for more than a second

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _rounds_alike(model: SplitModel) -> bool:
    """Whether the network consists of operations that round every sample alike, wherever in a tensor it stands."""
    with _Operations() as operations:
        tried = model.try_out()
    return tried is not None and operations.names <= ROUNDED_ALIKE


def try_out(engine: LocalEngine, state: ServerState, plan: RoundPlan) -> Trial | None:
    """Two rounds of one epoch in both ways; None if no two clients are of one size. The engine stays as it was."""
    sizes = engine.federation.partition.sizes
    values, counts = np.unique(sizes[sizes > 0], return_counts=True)
    if not len(values) or counts.max() < 2:
        return None
    clients = [int(c) for c in np.flatnonzero(sizes == values[counts.argmax()])[:TRIED]]
    before, weights = engine.stacked, clone(engine.model.state())
    try:
        seconds, ends = {}, {}
        for engine.stacked in (False, True):
            _rounds(engine, state, plan, clients)  # the first time is not the usual one
            started = time.process_time()
            ends[engine.stacked] = _rounds(engine, state, plan, clients)
            seconds[engine.stacked] = time.process_time() - started
    finally:
        engine.stacked = before
        engine.model.load(weights)
    largest = max((float(v.abs().max()) for v in ends[False].values() if v.numel()), default=0.0) or 1.0
    different = [(ends[True][name].double() - value.double()).abs().max() for name, value in ends[False].items()]
    equal = all(torch.equal(ends[True][name], value) for name, value in ends[False].items())
    return Trial(equal, float(max(different)) / largest, seconds[False] / max(seconds[True], 1e-9))


def _rounds(engine: LocalEngine, state: ServerState, plan: RoundPlan, clients: list[int]) -> Tensors:
    """Everything there is after two rounds: the server's state and what clients keep."""
    kept: dict[int, PartTensors] = {}
    for _ in range(2):
        plan = replace(
            plan,
            round=state.round,
            model=state.model,
            received=engine.recipe.broadcast(state.parts, state.round),
            local=replace(plan.local, epochs=1),
        )
        total = Total(keep_each=engine.recipe.needs_each)
        results: list[ClientResult] = list(engine.train(plan, clients, lambda client: kept.get(client, {})))
        for result in results:
            total.add(result.sums)
            kept[result.client] = result.kept
        state = finish_round(engine.recipe, engine.roles, state, total, len(engine.federation), plan.seed)
    own = {f"{client}/{name}": value for client, parts in kept.items() for name, value in flatten(parts).items()}
    return {**state.to_tensors(), **own}
