"""A method as a user would write it, with every kind of state there is; for tests of resume.

Each client keeps its last update and a counter, and leans on the update in its gradients; the server keeps a velocity
and scales by norms, so that one bit lost anywhere shows in all later rounds.
"""

from collections.abc import Mapping

import numpy as np
import torch

from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, ServerStep, Task
from fedfa.learning.tensors import Tensors, clone


class Habit(Component):
    """Client momentum from round to round, server velocity, a norm-dependent scale."""

    traits = Traits(broadcasts=True)

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        return {"pull": torch.from_numpy(rng.standard_normal(task.num_classes)).float()}

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        last = ctx.client_state.get(self.name, {})
        for name, parameter in ctx.model.module.named_parameters():
            if name in last and parameter.grad is not None:
                parameter.grad.add_(last[name], alpha=-0.2)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        before = ctx.client_state.get(self.name, {}).get("rounds", torch.tensor(0))
        ctx.client_state[self.name] = {**clone(ctx.update), "rounds": before + 1}
        noise = torch.from_numpy(ctx.rng.standard_normal(ctx.num_classes)).float()
        return {"pull": WeightedSum.of({"pull": ctx.broadcast[self.name]["pull"] + 0.01 * noise}, ctx.size)}

    def step(self, server: ServerStep) -> None:
        state = server.state[self.name]
        state["pull"] = server.aggregate.mean("habit/pull")["pull"].float()
        for name, update in server.update.items():
            if "running" in name or "num_batches" in name:  # statistics must not overshoot: variances stay positive
                continue
            velocity = 0.5 * state.get(f"velocity.{name}", torch.zeros_like(update)) + update
            state[f"velocity.{name}"] = velocity
            weights = server.model[name].float().norm().double()  # the sum's order is the memory's order
            server.update[name] = velocity * (weights + 1) / (weights + 1 + velocity.float().norm().double())
