"""Ditto: each client has a model of its own, held near the global one.

T. Li, S. Hu, A. Beirami, V. Smith, *Ditto: Fair and Robust Federated Learning Through Personalization*, ICML 2021,
arXiv:2012.04221, Algorithm 1. The global model w is trained by any method, here by the rest of the algorithm. Beside it
client k minimises h_k(v) = F_k(v) + λ/2 ‖v − w_t‖² (eq. 2) over its own model v_k, by steps of SGD with
∇F_k(v) + λ (v − w_t). λ = 0 is local training; the larger λ, the nearer to the global model.

F_k is the cross-entropy with the weight decay of the local training; terms of other methods act on w only. A client's
v_k starts as the first global model that it receives. The personal steps follow the client's own shuffles after the
training of w, which they do not change: the global model is FedAvg's, bit for bit.

What is reported: ``accuracy`` is the global model's; under ``own_data`` a record has the personal models', each on its
client's own distribution.

Sends per client and round: nothing more. Server state: none more. Client state: its own model (|w| numbers). Extra
compute: as much again as the local training. What the server learns: what it learns in FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import Field

from fedfa.learning.component import Component, Traits
from fedfa.learning.context import ClientContext
from fedfa.learning.local_loop import cross_entropy
from fedfa.learning.tensors import clone


class Ditto(Component):
    """A personal model beside the global one, trained on the client after each round's local training."""

    name = "ditto"
    traits = Traits(shared_model=True, personal_model=True)

    lam: float = Field(1.0, ge=0)
    """λ, the pull towards the global model."""
    epochs: int | None = Field(None, ge=1)
    """Epochs of the personal model in a round; left out, as many as ``local.epochs``."""
    lr: float | None = Field(None, gt=0)
    """Its learning rate; left out, that of the round."""

    def after_epoch(self, ctx: ClientContext) -> None:
        """After the training of w: train v from where it was, and put w back."""
        if not ctx.last_epoch:
            return
        model, local, trained = ctx.model, ctx.local, clone(ctx.model.state())
        model.load(ctx.client_state.get(self.name) or ctx.start)
        parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        rate, size = self.lr or local.lr, local.batch_size
        for _ in range(self.epochs or local.epochs):
            order = torch.from_numpy(ctx.rng.permutation(ctx.size))
            for positions in torch.split(order, size)[: local.batches_on(ctx.size)]:
                x, y = ctx.data.batch(positions)
                _, logits = model(x.to(ctx.device))
                loss = cross_entropy(logits, y.to(ctx.device))
                gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                with torch.no_grad():
                    for (name, v), gradient in zip(parameters.items(), gradients, strict=True):
                        if gradient is not None:
                            step = gradient + local.weight_decay * v + self.lam * (v - ctx.start[name])
                            v.sub_(step, alpha=rate)
        ctx.client_state[self.name] = clone(model.state())
        model.load(trained)
