"""FedBN: normalisation layers stay with the client.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, *FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization*, ICLR 2021. The paper's Algorithm 1 averages every layer except batch normalisation, whose scale, shift
and running statistics each client keeps. Meant for feature skew (each client's pictures look different, as in Mixed
Digits), with clients that come back.

A client that was never drawn still has the initial normalisation. There is no global model: what is reported is the
mean over the round's clients, each with its own layers on the test samples of its own domains, as in the paper.

Sends per client and round: the model without the normalisation layers, down and up. Server state: the model. Client
state: its normalisation layers (for each normalised channel a scale and a shift, with BatchNorm also mean and
variance). Extra compute: none. What the server learns: what it learns in FedAvg, without the normalisation layers, so
nothing of the clients' statistics of activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedfa.errors import AlgorithmError
from fedfa.learning.component import Component
from fedfa.learning.context import Role, Task
from fedfa.models.split import SplitModel

BATCH: tuple[type[nn.Module], ...] = (_BatchNorm,)
EVERY: tuple[type[nn.Module], ...] = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, _InstanceNorm, nn.RMSNorm)


class FedBN(Component):
    """The tensors of the normalisation layers stay on their client; the rest is averaged."""

    name = "fedbn"

    layers: Literal["all", "batch"] = "all"
    """``batch``: BatchNorm only, as published. ``all``: also GroupNorm, LayerNorm, InstanceNorm and RMSNorm, as far as
    they have tensors; the same thing for a network that has no others than BatchNorm."""

    def roles(self, task: Task) -> Mapping[str, Role]:
        """Local: scale, shift and running statistics of every normalisation layer."""
        chosen = normalisation_tensors(task.model, EVERY if self.layers == "all" else BATCH)
        if not chosen:
            others = normalisation_tensors(task.model, EVERY)
            raise AlgorithmError(
                "fedbn keeps normalisation layers on the client, but this network has "
                + (
                    'none but other kinds than BatchNorm: set algorithm.fedbn.layers = "all"'
                    if others
                    else 'none: choose model.name = "cnn-mixed-digits" with model.options.norm = "group" (its default) '
                    'or "resnet18-gn", or pass a network of your own that normalises'
                )
            )
        return dict.fromkeys(chosen, Role.LOCAL)


def normalisation_tensors(model: SplitModel, kinds: tuple[type[nn.Module], ...]) -> list[str]:
    """Names of the parameters and buffers of such layers; parameters that the author switched off are left out."""
    names, known = [], model.state()
    for prefix, module in model.module.named_modules():
        if isinstance(module, kinds):
            own = {name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad}
            own |= {name for name, _ in module.named_buffers(recurse=False)}
            names += [f"{prefix}.{name}" if prefix else name for name in sorted(own)]
    return [name for name in names if name in known]
