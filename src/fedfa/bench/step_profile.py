"""Where the time of one local step goes, and how far it is from what the processor can do.

    python -m fedfa.bench.step_profile --algorithm fedfa

One client's round of the paper's CNN in one thread: first timed as it is, then again under torch's profiler, whose
shares are applied to the first time. Operations count to the hook of the method in which they happen, else to the layer
they belong to; what no operation accounts for is Python.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedfa.bench.plain import CNN, ENV_RESULT

GROUPS = {
    "convolution, backward": ("aten::convolution_backward",),
    "convolution, forward": ("aten::conv2d",),
    "pooling": ("aten::max_pool2d", "autograd::engine::evaluate_function: MaxPool2DWithIndicesBackward0"),
    "fully connected layers": ("aten::linear", "autograd::engine::evaluate_function: AddmmBackward0"),
    "ReLU": ("aten::relu", "autograd::engine::evaluate_function: ReluBackward0"),
    "optimiser": ("Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad", "aten::_fused_sgd_"),
    "cross-entropy": (
        "aten::cross_entropy_loss",
        "autograd::engine::evaluate_function: NllLossBackward0",
        "autograd::engine::evaluate_function: LogSoftmaxBackward0",
    ),
    "batch: choosing and normalising": ("bench::batch",),
}
"""Operations by what they are for; of nested ones the outermost decides."""
HOOK = "bench::hook "


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default="fedfa")
    parser.add_argument("--clients", type=int, default=5)
    asked = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
    train = _client_round(asked.algorithm)
    train(0)
    plain = min(train(client) for client in range(1, asked.clients + 1))
    flops = _operations(train)
    peak = matmul_peak()
    shares = _shares(train)
    found = {
        "algorithm": asked.algorithm,
        "step_seconds": plain / CNN.steps,
        "shares": shares,
        "flop_per_step": flops / CNN.steps,
        "flop_per_second": flops / plain,
        "matmul_peak": peak,
        "share_of_peak": flops / plain / peak,
        "versions": {"torch": torch.__version__},
    }
    Path(os.environ[ENV_RESULT]).write_text(json.dumps(found), encoding="utf-8")


def _client_round(algorithm: str) -> Callable[[int], float]:
    """A function that trains one client of the first round, with labels on the hooks for the profiler."""
    from torch.profiler import record_function

    from fedfa.bench.tasks import client_round, dataset, prepared
    from fedfa.data.federation import ClientSamples
    from fedfa.learning.part import HOOKS

    lab = prepared(CNN, algorithm, dataset(CNN))

    def labelled(call: Callable[..., Any], label: str) -> Callable[..., Any]:
        def with_label(*arguments: Any) -> Any:
            with record_function(label):
                return call(*arguments)

        return with_label

    # Bound hooks and a class's method are replaced on purpose (hence the ignores), in a process that does nothing else.
    for name in HOOKS:
        hooks = lab.recipe.hooks(name)
        hooks[:] = [labelled(hook, f"{HOOK}{hook.__self__.name}: {name}") for hook in hooks]  # type: ignore[attr-defined]
    ClientSamples.batch = labelled(ClientSamples.batch, "bench::batch")  # type: ignore[method-assign]
    return client_round(lab)


def _operations(train: Callable[[int], float]) -> int:
    """Floating-point operations of a client's round, as torch counts them (products and convolutions)."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        train(0)
    return int(counter.get_total_flops())


def matmul_peak(sizes: Iterable[int] = (512, 1024, 2048), seconds: float = 1.0) -> float:
    """The most floating-point operations a second that a product of float32 matrices reaches in one thread."""
    import torch

    best = 0.0
    for size in sizes:
        a, b = torch.rand(size, size), torch.rand(size, size)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            begun = time.process_time()
            torch.mm(a, b)
            best = max(best, 2 * size**3 / (time.process_time() - begun))
    return best


def _shares(train: Callable[[int], float]) -> dict[str, float]:
    """Share of the time by what it is for, largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begun = time.perf_counter()  # as the profiler itself
        train(1)
        whole = time.perf_counter() - begun
    times: dict[str, float] = {}
    for event in profiler.events() or []:
        group = group_of(event)
        times[group] = times.get(group, 0.0) + event.self_cpu_time_total / 1e6
    times["Python"] = max(0.0, whole - sum(times.values()))
    total = sum(times.values())
    return {name: spent / total for name, spent in sorted(times.items(), key=lambda item: -item[1])}


def group_of(event: Any) -> str:
    """What an operation is for: the hook it happens in, else the outermost operation that has a group."""
    found = "other operations"
    while event is not None:
        if event.name.startswith(HOOK):
            return str(event.name.removeprefix(HOOK))
        found = next((group for group, names in GROUPS.items() if event.name in names), found)
        event = event.cpu_parent
    return found


if __name__ == "__main__":
    main()
