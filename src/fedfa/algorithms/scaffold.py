"""SCAFFOLD: control variates take the client's own direction out of its drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, *SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning*, ICML 2020, Algorithm 1.

Local steps are y_i ← y_i − η (g_i(y_i) − c_i + c). Control variates start at zero. After K steps a client renews its
own, by option I as the gradient of its loss at the received x, or by option II as c_i⁺ = c_i − c + (x − y_i)/(K η),
which is the mean of the gradients of its steps. The server makes x ← x + η_g · mean(y_i − x) and c ← c + |S|/N ·
mean(c_i⁺ − c_i), so that c is the mean of all c_i.

- K counts the steps that were made, and η is this round's learning rate, decay included. A client without a step keeps
  its c_i.
- Weight decay is part of the gradient a local step uses. Option II's difference (x − y_i)/(K η) contains it by itself,
  and option I adds it, so c and c_i both have it and it cancels in c − c_i up to how far the model moved since.
- Local momentum is refused with option II: a step is then no longer η times a gradient, the difference overstates the
  mean gradient by up to 1/(1 − momentum), and the feedback through c_i diverges.
- What other components do to the weights outside the optimiser's steps (FedFA's calibration) is part of y_i − x,
  and so, with option II, of c_i.
- Option I is one more pass over all of the client's data per round (also with ``drop_last``: an epoch skips other
  samples each time, so the mean over all is its expected gradient), with the cross-entropy alone (loss terms of other
  components are not in it) and the network in training mode; its running statistics are put back.
- Clients count equally, so the fixed point is that of Σ f_i, where FedAvg weighs clients by their samples: on unequal
  clients the two differ in objective too. With ``weighting = "samples"`` it is that of Σ n_i f_i, and c must stay
  Σ n_i c_i / n over *all* clients, whoever is active: c ← c + Σ_S n_i (c_i⁺ − c_i) / n. A client adds its n_i to n when
  it first takes part; while some clients have not, n is the mean of those seen times the number of clients.

Sends per client and round: 2|w| down (x and c; in the first round c = 0 is not sent), 2|w| up. Server state: c. Client
state: c_i, also through rounds without it. With ``weighting = "samples"`` two numbers more, sent and stored. Extra
compute: one pass over the parameters per step. What the server learns: besides FedAvg's update the change of c_i; with
option II that follows from the update, with option I it is a gradient of the client's whole data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional

from fedfa.algorithms.gradients import add_to_gradients, laid_out_like
from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import Batch, ClientContext, ServerStep, Task
from fedfa.learning.tensors import Tensors, clone

_SEEN = "samples and clients seen"
"""On the server, their numbers; on a client, that it has been counted."""


class Scaffold(Component):
    """Control variates c on the server and c_i on the clients."""

    name = "scaffold"
    traits = Traits(
        aggregates=True,
        broadcasts=True,
        shared_model=True,
        sgd_steps=True,
        excludes={
            "fedprox": "the mean of μ (y − x) would enter c_i and work against the proximal term in the next round; "
            "leave out one of the two"
        },
        stale={"control": "keep", "seen": "keep"},  # c stays the mean of all c_i
        exact=("control", "seen"),
    )

    option: Literal[1, 2] = 2
    """How a client renews its control variate: 1, the gradient at the received model; 2, from its own steps (cheaper,
    and what the authors use). With long local training only 2 is stable: a client soon fits its data, its gradient
    vanishes, and 1 goes on subtracting the large one it began with."""
    server_lr: float = Field(1.0, gt=0)
    """Global step size η_g."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """Weight of a client in the mean of the models and in the mean of the control variates alike: one for all (as
    published), or its number of samples."""

    @property
    def refuses(self) -> Mapping[str, str]:
        """Everything that changes sums, where the server counts samples."""
        reason = 'it counts samples by exact sums; set algorithm.scaffold.weighting = "uniform"'
        return dict.fromkeys(("robust", "privacy"), reason) if self.weighting == "samples" else {}

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """C starts at zero, which need not be stored. Option II needs plain gradient steps."""
        if self.option == 2 and task.local is not None and task.local.momentum > 0:
            raise AlgorithmError(
                "scaffold takes (x − y)/(K·lr) for the mean gradient of a client's steps, which with "
                f"local.momentum = {task.local.momentum:g} it is not; set local.momentum = 0, or "
                "algorithm.scaffold.option = 1"
            )
        return {}

    def begin(self, ctx: ClientContext) -> None:
        """The correction c − c_i, which stays the same all round; with option I also the gradient at x."""
        mine = ctx.scratch[self.name] = {}
        broadcast, own = ctx.broadcast.get(self.name, {}), ctx.client_state.get(self.name, {})
        if broadcast or own:
            difference = {name: _or_zero(broadcast, name, ctx) - _or_zero(own, name, ctx) for name in ctx.parameters}
            mine["correction"] = laid_out_like(ctx.parameters, difference)
        if self.option == 1:
            mine["gradient"] = whole_gradient(ctx)

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        """Make it g − c_i + c."""
        if (correction := ctx.scratch[self.name].get("correction")) is not None:
            add_to_gradients(ctx.parameters.values(), correction)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        """y_i − x and c_i⁺ − c_i; and c_i ← c_i⁺."""
        broadcast, own = ctx.broadcast.get(self.name, {}), ctx.client_state.setdefault(self.name, {})
        change: Tensors = {}
        for name in ctx.parameters:
            old = new = _or_zero(own, name, ctx)
            if ctx.steps and self.option == 1:
                new = ctx.scratch[self.name]["gradient"][name]
            elif ctx.steps:
                new = old - _or_zero(broadcast, name, ctx) - ctx.update[name] / (ctx.steps * ctx.local.lr)
            own[name], change[name] = new, new - old
        if self.weighting == "uniform":
            return {"model": WeightedSum.of(ctx.update, 1), "control": WeightedSum.of(change, 1)}
        counted = torch.tensor([0, 0] if _SEEN in own else [ctx.size, 1], dtype=torch.float64)
        own[_SEEN] = torch.tensor(True)
        return {
            "model": WeightedSum.of(ctx.update, ctx.size),
            "control": WeightedSum.of(change, ctx.size),
            "seen": WeightedSum.of({_SEEN: counted}, 1),
        }

    def step(self, server: ServerStep) -> None:
        """Model x ← x + η_g · mean Δy, control c ← c + |S|/N · mean Δc; statistics are only averaged."""
        server.update = server.aggregate.mean(f"{self.name}/model")
        for name in server.trained:
            server.update[name] = self.server_lr * server.update[name]
        keep, share = self._factors(server)
        control = server.state[self.name]
        for name, change in server.aggregate.mean(f"{self.name}/control").items():
            old = control.get(name, torch.zeros_like(server.model[name]))
            control[name] = (keep * old + share * change).to(old.dtype)

    def _factors(self, server: ServerStep) -> tuple[float, float]:
        """What c and the cohort's mean change are multiplied by, so that c remains the mean over all clients."""
        if self.weighting == "uniform":
            return 1.0, server.aggregate.clients / server.num_clients
        state, total = server.state[self.name], server.aggregate
        before = state.get(_SEEN, torch.zeros(2, dtype=torch.float64))
        state[_SEEN] = before + total[f"{self.name}/seen"].tensors[_SEEN]
        old, new = (
            float(samples) * server.num_clients / max(float(clients), 1) for samples, clients in (before, state[_SEEN])
        )
        return (old / new if old else 1.0), float(total[f"{self.name}/control"].weight) / new


def whole_gradient(ctx: ClientContext) -> Tensors:
    """∇f_i at the network's present weights, weight decay included, over all the client's samples."""
    batch_size, device, everything = ctx.local.batch_size, ctx.device, torch.arange(ctx.size)
    if ctx.local.drop_last:  # parts of about one size: BatchNorm cannot take a rest of one sample
        parts = torch.tensor_split(everything, -(-ctx.size // batch_size)) if ctx.local.batches_on(ctx.size) else ()
    else:
        parts = torch.split(everything, batch_size) if ctx.size else ()
    parameters = list(ctx.parameters.values())
    gradient = [ctx.local.weight_decay * parameter.detach() for parameter in parameters]
    state = ctx.model.state()
    statistics = clone({name: state[name] for name in ctx.model.buffer_names()})
    for positions in parts:
        x, y = ctx.data.batch(positions)
        _, logits = ctx.model(x.to(device))
        loss = functional.cross_entropy(logits, y.to(device), reduction="sum") / ctx.size
        terms = torch.autograd.grad(loss, parameters, allow_unused=True)
        for total, term in zip(gradient, terms, strict=True):
            if term is not None:
                total.add_(term)
    ctx.model.load(statistics)
    return dict(zip(ctx.parameters, gradient, strict=True))


def _or_zero(control: Mapping[str, torch.Tensor], name: str, ctx: ClientContext) -> torch.Tensor:
    return control[name] if name in control else torch.zeros_like(ctx.start[name])
