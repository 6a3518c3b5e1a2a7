"""Names of the classifier's tensors, for a server step that changes the classifier.

The server knows the model by names only; which of them are the classifier follows from the network, which only the task
has. State is tensors, so the positions of the names among all names are stored.
"""

from __future__ import annotations

import torch

from fedfa.learning.context import ServerStep, Task
from fedfa.learning.tensors import Tensors

_HEAD = "head"


def remember_classifier(task: Task) -> Tensors:
    """State for a component that calls :func:`classifier_names` later."""
    names = sorted(task.model.state())
    return {_HEAD: torch.tensor([names.index(name) for name in task.model.head_tensors])}


def classifier_names(server: ServerStep, component: str) -> list[str]:
    """Names of the classifier's weight and, if there is one, its bias."""
    names = sorted(server.model)
    return [names[int(place)] for place in server.state[component][_HEAD]]
