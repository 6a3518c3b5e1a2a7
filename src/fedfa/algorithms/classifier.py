"""The classifier: another one in its place, and its tensors' names for a server step that changes it.

The server knows the model by names only; which of them are the classifier follows from the network, which only the task
has. State is tensors, so the positions of the names among all names are stored.
"""

from __future__ import annotations

import torch
from torch import nn

from fedfa.learning.context import ServerStep, Task
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel

_HEAD = "head"


def replace_head(model: SplitModel, head: nn.Module, linear: str) -> SplitModel:
    """The network with another module in place of its classifier.

    Args:
        model: The network, which is changed.
        head: From the features to the logits.
        linear: Name of the linear layer within ``head`` that makes the logits.
    """
    if not model.head_name:  # the network is nothing but its classifier
        return SplitModel(nn.Sequential(head), f"0.{linear}", model.example)
    # A layer that the network holds under several names is replaced under each of them.
    names = [name for name, layer in model.module.named_modules(remove_duplicate=False) if layer is model.head]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.module.get_submodule(parent), leaf, head)
    return SplitModel(model.module, f"{names[0]}.{linear}", model.example)


def remember_classifier(task: Task) -> Tensors:
    """State for a component that calls :func:`classifier_names` later."""
    names = sorted(task.model.state())
    return {_HEAD: torch.tensor([names.index(name) for name in task.model.head_tensors])}


def classifier_names(server: ServerStep, component: str) -> list[str]:
    """Names of the classifier's weight and, if there is one, its bias."""
    names = sorted(server.model)
    return [names[int(place)] for place in server.state[component][_HEAD]]
