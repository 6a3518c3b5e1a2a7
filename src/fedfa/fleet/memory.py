"""What the clock carries from round to round, as named tensors: one more entry of the server state's checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fedfa.fleet.visits import Visit
from fedfa.learning.aggregate import flatten_contribution, unflatten_contribution
from fedfa.learning.client import ClientResult
from fedfa.learning.round import ServerState
from fedfa.learning.tensors import Tensors, clone, contiguous, flatten, unflatten

CLOCK = "clock"
"""Name among the components of the server state."""
_RESULT = "result "


@dataclass(frozen=True)
class ClockMemory:
    """The clock between two rounds."""

    time: float = 0.0
    draws: int = 0
    upload: int = 0
    """Bytes of the largest contribution of the last round; 0 before the first."""
    running: list[Visit] = field(default_factory=list)
    results: dict[int, ClientResult] = field(default_factory=dict)
    """Results of running visits, by client: trained already, but not arrived."""

    @classmethod
    def of(cls, state: ServerState) -> ClockMemory:
        """The memory in a server state; a new one before the first round."""
        found = state.components.get(CLOCK)
        if found is None:
            return cls()
        running = [Visit.of_row(row) for row in found["running"].tolist()]
        by_client: dict[int, dict[str, Tensors]] = {}
        for name, value in found.items():
            if name.startswith(_RESULT):
                client, kind, own = name.removeprefix(_RESULT).split(" ", 2)
                by_client.setdefault(int(client), {}).setdefault(kind, {})[own] = value
        return cls(
            float(found["time"]), int(found["draws"]), int(found["upload"]), running,
            {client: _decoded(client, parts) for client, parts in by_client.items()},
        )  # fmt: skip

    def added_to(self, state: ServerState) -> ServerState:
        """The server state with this memory."""
        rows = torch.tensor([visit.row() for visit in self.running], dtype=torch.float64).reshape(-1, 7)
        tensors: Tensors = {
            "time": torch.tensor(self.time, dtype=torch.float64),
            "draws": torch.tensor(self.draws),
            "upload": torch.tensor(self.upload),
            "running": rows,
        }
        for client, result in self.results.items():
            for kind, own in _encoded(result).items():
                tensors |= {f"{_RESULT}{client} {kind} {name}": value for name, value in own.items()}
        return replace(state, components={**state.components, CLOCK: tensors})


def detached(result: ClientResult) -> ClientResult:
    """A result that shares no memory with another one, and without the machine's own time: it goes to a checkpoint."""
    contribution = unflatten_contribution(contiguous(clone(flatten_contribution(result.contribution))))
    state = {component: contiguous(clone(own)) for component, own in result.client_state.items()}
    return replace(result, contribution=contribution, client_state=state, cpu_seconds=0.0)


def _encoded(result: ClientResult) -> Mapping[str, Tensors]:
    loss = math.nan if result.loss is None else result.loss
    wire = -1 if result.wire_nbytes is None else result.wire_nbytes
    numbers = torch.tensor([result.steps, result.sample_steps, loss, wire], dtype=torch.float64)
    return {
        "numbers": {"numbers": numbers},
        "contribution": flatten_contribution(result.contribution),
        "state": flatten(result.client_state),
    }


def _decoded(client: int, parts: Mapping[str, Tensors]) -> ClientResult:
    steps, samples, loss, wire = parts["numbers"]["numbers"].tolist()
    return ClientResult(
        client=client,
        contribution=unflatten_contribution(parts.get("contribution", {})),
        client_state=unflatten(parts.get("state", {})),
        steps=int(steps),
        sample_steps=int(samples),
        loss=None if math.isnan(loss) else loss,
        wire_nbytes=None if wire < 0 else int(wire),
    )
