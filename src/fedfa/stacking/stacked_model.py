"""Several networks of one kind as one: every tensor gets a leading axis, one entry per network.

Small networks leave a processor idle: what a step costs is Python and the start of each operation, not arithmetic. With
the networks of K clients in one, an operation is started once instead of K times. The layers of a network are replaced
by layers that do the same for K weights at once; the network's own ``forward`` is used as it is.

Vectors pass as ``[K, B, d]``. Images pass as ``[B, K·C, H, W]``, so that a convolution in K groups serves K networks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfa.errors import ModelError
from fedfa.models.split import SplitModel
from fedfa.stacking.chain import Chain
from fedfa.stacking.products import product

_SAME_FOR_EACH = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh,
    nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
"""Layers without weights that treat each element or each channel alone."""


class NotStackableError(ModelError):
    """The network has a layer of which no stacked form is known; it is trained one client at a time."""


class StackedModel(SplitModel):
    """K networks of one kind as one. Called with inputs ``[K, B, …]``, it returns features and logits ``[K, B, …]``.

    Raises:
        NotStackableError: A layer has no stacked form, or the network does not compute the same when it is stacked.
    """

    def __init__(self, model: SplitModel, clients: int) -> None:
        _refuse_hooks(model.module)
        images = any(isinstance(layer, nn.Conv2d) for layer in model.module.modules())
        stacked = _stacked(model.module, clients, images, "")
        originals = dict(model.module.named_parameters())
        parameters = dict(stacked.named_parameters())
        if parameters.keys() != originals.keys():
            tied = ", ".join(sorted(parameters.keys() ^ originals.keys()))
            raise NotStackableError(f"no stacked form of weights that two layers share ({tied})")
        for name, parameter in parameters.items():
            parameter.requires_grad_(originals[name].requires_grad)
        super().__init__(stacked, model.head_name)
        self.clients, self._images = clients, images
        self.chain = Chain.find(stacked, self.head, StackedFlatten)
        if model.example is not None:
            _refuse_if_different(self, model, model.example)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of one batch for each network."""
        return super().__call__(_as_groups(x) if self._images else x)

    def load_each(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy the tensors of K networks into this one."""
        with torch.no_grad():
            for name, value in self.state().items():
                each = [state[name] for state in states]
                if all(one is each[0] for one in each):  # usually all start from what the server sent
                    value.copy_(each[0])
                else:
                    torch.stack(each, out=value)

    def states(self) -> list[dict[str, Tensor]]:
        """The tensors of each network: views of the live ones."""
        split = {name: value.unbind(0) for name, value in self.state().items()}
        return [{name: values[k] for name, values in split.items()} for k in range(self.clients)]


def _as_groups(x: Tensor) -> Tensor:
    """Images ``[K, B, C, H, W]`` as ``[B, K·C, H, W]``."""
    return x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _stacked(layer: nn.Module, clients: int, images: bool, name: str) -> nn.Module:
    """The layer's stacked form, with its children."""
    made: nn.Module
    if type(layer) is nn.Linear:
        made = StackedLinear(layer, clients)
    elif type(layer) is nn.Conv2d:
        made = _StackedConvolution(layer, clients)
    elif type(layer) is nn.GroupNorm:
        made = _StackedGroupNorm(layer, clients)
    elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        made = StackedFlatten(clients, images)
    elif type(layer) in _SAME_FOR_EACH:
        made = copy.deepcopy(layer)
    elif next(layer.children(), None) is not None and _own_tensors_may_be_stacked(layer):
        made = copy.copy(layer)
        made._parameters = {n: _repeated(p, clients) for n, p in layer._parameters.items()}
        made._modules = {n: m and _stacked(m, clients, images, f"{name}.{n}") for n, m in layer._modules.items()}
    else:
        raise NotStackableError(f"no stacked form of {type(layer).__name__} ({name.strip('.') or 'the network'})")
    made._forward_hooks, made._forward_pre_hooks = OrderedDict(), OrderedDict()  # they belong to the original
    return made


def _own_tensors_may_be_stacked(layer: nn.Module) -> bool:
    """Whether a layer with children has no tensors of its own, or a ``forward`` that takes them with a client axis."""
    return not layer._buffers and (not layer._parameters or getattr(layer, "client_axis", False) is True)


def _refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks that are not a split's own: what they do is unknown, and they would be lost."""
    for name, layer in module.named_modules():
        forward = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values())
        if layer._backward_hooks or layer._backward_pre_hooks or not all(map(SplitModel.is_own_hook, forward)):
            raise NotStackableError(f"no stacked form of hooks (of {name or 'the network'})")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise NotStackableError(f"no stacked form of hooks (of {name})")


def _repeated(tensor: Tensor | None, clients: int) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach().expand(clients, *tensor.shape).contiguous())


class StackedLinear(nn.Linear):
    """K linear layers: ``[K, B, in]`` to ``[K, B, out]``."""

    def __init__(self, layer: nn.Linear, clients: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = _repeated(layer.weight, clients)
        assert weight is not None
        self.weight = weight
        self.register_parameter("bias", _repeated(layer.bias, clients))

    def forward(self, x: Tensor) -> Tensor:
        """The sum x Wᵀ + b, for each."""
        return product(x, self.weight.mT, self.bias)


class _StackedConvolution(nn.Module):
    def __init__(self, layer: nn.Conv2d, clients: int) -> None:
        super().__init__()
        if layer.padding_mode != "zeros":
            raise NotStackableError(f"no stacked form of a convolution with padding_mode={layer.padding_mode!r}")
        self.weight = _repeated(layer.weight, clients)
        self.bias = _repeated(layer.bias, clients)
        self.how = (layer.stride, layer.padding, layer.dilation, layer.groups * clients)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.flatten()
        # (Padding is numbers or a word: torch's stubs have a form for each, none for either.)
        return functional.conv2d(x, self.weight.flatten(0, 1), bias, *self.how)  # type: ignore[arg-type]  # a tuple of mixed types


class _StackedGroupNorm(nn.Module):
    def __init__(self, layer: nn.GroupNorm, clients: int) -> None:
        super().__init__()
        self.clients, self.groups, self.eps = clients, layer.num_groups, layer.eps
        self.weight, self.bias = _repeated(layer.weight, clients), _repeated(layer.bias, clients)

    def forward(self, x: Tensor) -> Tensor:
        vectors = x.dim() == 3  # [K, B, d]; as [B, K·d] the groups of K networks lie next to each other
        channels = x.transpose(0, 1).flatten(1) if vectors else x
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        normed = functional.group_norm(channels, self.clients * self.groups, weight, bias, self.eps)
        return normed.view(len(normed), self.clients, -1).transpose(0, 1) if vectors else normed


class StackedFlatten(nn.Module):
    """One vector per sample."""

    def __init__(self, clients: int, images: bool) -> None:
        super().__init__()
        self.clients, self.images = clients, images

    def forward(self, x: Tensor) -> Tensor:
        """From images, or from samples of any shape, to ``[K, B, d]``."""
        if not self.images:
            return x.flatten(2)
        return x.reshape(len(x), self.clients, -1).transpose(0, 1)


def _refuse_if_different(stacked: StackedModel, model: SplitModel, example: Tensor) -> None:
    """Whether each of K different networks computes from inputs of its own what it computes alone, as in training."""
    own, was_training = {name: value.clone() for name, value in model.state().items()}, model.module.training
    factors = [1 + k / stacked.clients for k in range(stacked.clients)]
    example = example.to(next(iter(own.values())).device)
    inputs = torch.stack([example * factor for factor in factors])
    try:
        states = [{n: v * f if v.is_floating_point() else v for n, v in own.items()} for f in factors]
        stacked.load_each(states)
        stacked.module.train()
        model.module.train()  # a network may do more then, such as draw at random
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            together = stacked(inputs)
            for k, state in enumerate(states):
                model.load(state)
                for one, all_ in zip(model(inputs[k]), together, strict=True):
                    if one.shape != all_[k].shape or not torch.allclose(one, all_[k], rtol=1e-4, atol=1e-4):
                        raise ValueError("other values come out")
    except (RuntimeError, ValueError, IndexError) as error:
        raise NotStackableError(
            f"{type(model.module).__name__} does not compute the same when stacked: {str(error).splitlines()[0]}"
        ) from error
    finally:
        model.module.train(was_training)
        model.load(own)
