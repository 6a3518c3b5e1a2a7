"""Split of any network into features and a linear classifier.

FedFA (like MOON, FedProc, CCVR …) uses *features*: the input of the last, linear layer. :class:`SplitModel` finds that
layer in an unmodified network and captures its input.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedfa.error_messages import nearest
from fedfa.errors import ModelError
from fedfa.trees import NetworkInput, call, describe, to_device


class SplitModel:
    """A network as ``features → linear classifier``.

    Create one with :meth:`of`. Calling it returns ``(features, logits)``, both with their autograd graph.
    """

    def __init__(self, module: nn.Module, head_name: str, example: NetworkInput | None = None) -> None:
        head = module.get_submodule(head_name)
        assert isinstance(head, nn.Linear)
        self.module = module
        self.head = head
        self.head_name = head_name
        self.example = example
        """A small input batch, where one is known, to inspect the network's layers."""
        self._features: Tensor | None = None
        self._watched: list[RemovableHandle] = []
        self._found: list[tuple[str, dict[str, Any], str]] | None = None
        self.outputs: dict[str, Tensor] = {}
        """Outputs of the watched modules in the last forward pass, with their graph."""
        head.register_forward_pre_hook(self._capture)

    @classmethod
    def of(cls, module: nn.Module, head: str | None = None, example: NetworkInput | None = None) -> SplitModel:
        """Split a network at its linear classifier.

        Args:
            module: Any network whose output is the output of an ``nn.Linear``.
            head: Name of that layer (as in ``module.named_modules()``). By default, with an example it is the layer
                whose output *is* the network's output, without one the last registered linear layer.
            example: A small input batch; where given, the split is verified by a forward pass.

        Raises:
            ModelError: There is no such layer, or the network has operations after it.

        Example:
            >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
            >>> split = SplitModel.of(net)
            >>> split.head_name, split.feature_dim, split.num_classes
            ('2', 3, 2)
        """
        linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        kind = type(module).__name__
        for name, layer in module.named_modules():
            if type(layer).get_extra_state is not nn.Module.get_extra_state:
                raise ModelError(
                    f"{kind} has state that is not a tensor (get_extra_state of {name or 'the network'}); "
                    "it cannot be sent or averaged: keep it in buffers"
                )
        if not linears:
            raise ModelError(f"{kind} has no nn.Linear layer; FedFA needs a linear classifier as the last layer")
        if head is not None and head not in linears:
            raise ModelError(f"{kind} has no linear layer {head!r}; its linear layers are {', '.join(linears)}")
        if example is None:
            return cls(module, head or list(linears)[-1])
        last = _layer_that_makes_the_output(module, linears, example)
        if last is None or (head is not None and head != last):
            raise ModelError(
                f"the output of {kind} is not the output of its linear layer {head or list(linears)[-1]!r}; let the "
                "network return the raw logits of its last linear layer (no softmax, no reshaping after it)"
            )
        return cls(module, last, example)

    @property
    def feature_dim(self) -> int:
        """Width of the features."""
        return self.head.in_features

    @property
    def num_classes(self) -> int:
        """Number of outputs."""
        return self.head.out_features

    @property
    def head_tensors(self) -> list[str]:
        """Names of the classifier's weight and, if it has one, its bias; as in :meth:`state`."""
        prefix = f"{self.head_name}." if self.head_name else ""
        return [f"{prefix}weight"] if self.head.bias is None else [f"{prefix}weight", f"{prefix}bias"]

    def __call__(self, x: NetworkInput) -> tuple[Tensor, Tensor]:
        """Features and logits of a batch."""
        self.outputs = {}
        logits = self.module(x) if isinstance(x, Tensor) else call(self.module, x)
        features = self._features
        assert features is not None, "the classifier was not called in the forward pass"
        self._features = None  # do not keep the graph alive
        return features, logits

    def try_out(self) -> tuple[Tensor, Tensor] | None:
        """Features and logits of the example, without changing the network; also fills :attr:`outputs`."""
        if self.example is None:
            return None
        was_training = self.module.training
        self.module.eval()
        parameter = next(self.module.parameters())
        with torch.no_grad():
            result = self(to_device(self.example, parameter.device))
        self.module.train(was_training)
        return result

    def watch(self, names: Sequence[str]) -> None:
        """Record the outputs of these modules, and of no others, in :attr:`outputs` from now on.

        Raises:
            ModelError: The network has no such module.
        """
        modules = dict(self.module.named_modules())
        for name in names:
            if name not in modules:
                known = ", ".join(filter(None, modules))
                raise ModelError(f"the network has no module {name!r}{nearest(name, modules)}; its modules are {known}")
        for handle in self._watched:
            handle.remove()
        self._watched = [modules[name].register_forward_hook(partial(self._keep_output, name)) for name in names]

    def _keep_output(self, name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.outputs[name] = output

    def state(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name: the live tensors, detached from the graph.

        Tied weights appear once. Buffers are included even if they are not persistent: everything that can change in
        training must be transferred, or clients would inherit it from each other.
        """
        tensors = {}
        for name, holder, key in self._places():
            value = holder[key]
            assert value is not None
            tensors[name] = value.detach()
        return tensors

    def _places(self) -> list[tuple[str, dict[str, Any], str]]:
        """Owner and key of each tensor, cached because traversing the modules takes longer than a small training step.

        The tensors themselves are not cached: moving a network to a device replaces some of them.
        """
        if self._found is None:
            modules = dict(self.module.named_modules())
            names = [(name, "_parameters") for name, _ in self.module.named_parameters()]
            names += [(name, "_buffers") for name, _ in self.module.named_buffers()]
            split = [(name, name.rpartition("."), kind) for name, kind in names]
            self._found = [(name, getattr(modules[owner], kind), key) for name, (owner, _, key), kind in split]
        return self._found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values into the network's tensors; tensors that are not given stay unchanged."""
        if tensors:
            live = {name: holder[key] for name, holder, key in self._places()}
            with torch.no_grad():
                torch._foreach_copy_([live[name] for name in tensors], list(tensors.values()))

    def buffer_names(self) -> set[str]:
        """Names of the tensors that are not trained, such as BatchNorm's running statistics."""
        return self.state().keys() - {name for name, _ in self.module.named_parameters()}

    @staticmethod
    def is_own_hook(hook: Any) -> bool:
        """Whether a forward hook of a module was registered by a :class:`SplitModel`."""
        return isinstance(getattr(getattr(hook, "func", hook), "__self__", None), SplitModel)

    def plain_copy(self) -> nn.Module:
        """A copy of the network as it was given, without the hooks of the split."""
        module = copy.deepcopy(self.module)
        for layer in module.modules():
            for hooks in (layer._forward_hooks, layer._forward_pre_hooks):
                for key in [key for key, hook in hooks.items() if self.is_own_hook(hook)]:
                    del hooks[key]
        return module

    def _capture(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._features = args[0]


def _layer_that_makes_the_output(
    module: nn.Module, linears: Mapping[str, nn.Linear], example: NetworkInput
) -> str | None:
    outputs: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        return lambda _module, _args, output: outputs.__setitem__(name, output)

    handles = [layer.register_forward_hook(remember(name)) for name, layer in linears.items()]
    was_training = module.training
    module.eval()  # leave running statistics alone
    try:
        with torch.no_grad():
            result = call(module, example)
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__} does not accept inputs of shape {describe(example)}: {error}"
        ) from error
    finally:
        module.train(was_training)
        for handle in handles:
            handle.remove()
    return next((name for name, output in outputs.items() if output is result), None)
