"""Which of the model's tensors are the classifier, for servers that change it after training.

The server knows the model by names alone; the names of the classifier's tensors follow from the network, which only the
task has. They are remembered as places among all names, because state is tensors.
"""

from __future__ import annotations

import torch

from fedfa.learning.part import ServerStep, Task
from fedfa.learning.tensors import Tensors

_HEAD = "head"


def remember_classifier(task: Task) -> Tensors:
    """State for a part that will ask for :func:`classifier_names`."""
    names = sorted(task.model.state())
    return {_HEAD: torch.tensor([names.index(name) for name in task.model.head_tensors])}


def classifier_names(server: ServerStep, part: str) -> list[str]:
    """Names of the classifier's weight and, if there is one, its bias."""
    names = sorted(server.model)
    return [names[int(place)] for place in server.state[part][_HEAD]]
