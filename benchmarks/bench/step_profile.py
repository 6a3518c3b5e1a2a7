"""Where the time of one local step goes, and how close it comes to the processor's peak.

    python -m benchmarks.bench.step_profile --algorithm fedfa

One client's round of the paper's CNN in one thread: timed as it is, then again under torch's profiler for the shares.
An operation belongs to the method's hook in which it runs, else to its layer; the remaining time is Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bench.contender_api import CNN, write_result
from benchmarks.bench.fedfa_tasks import client_round, dataset, prepared, wrap_steps

BACKWARD = "autograd::engine::evaluate_function: "
LABEL = "bench::"
HOOK = f"{LABEL}hook "
GROUPS = {
    "convolution, backward": ("aten::convolution_backward",),
    "convolution, forward": ("aten::conv2d",),
    "pooling": ("aten::max_pool2d", f"{BACKWARD}MaxPool2DWithIndicesBackward0"),
    "fully connected layers": ("aten::linear", f"{BACKWARD}AddmmBackward0"),
    "ReLU": ("aten::relu", f"{BACKWARD}ReluBackward0"),
    "optimiser": ("Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad", "aten::_fused_sgd_"),
    "cross-entropy": (
        "aten::cross_entropy_loss", f"{BACKWARD}NllLossBackward0", f"{BACKWARD}LogSoftmaxBackward0",
    ),
    "batch: choosing and normalising": (f"{LABEL}batch",),
}  # fmt: skip
"""Operations by purpose; the outermost of nested ones decides."""


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default="fedfa")
    parser.add_argument("--clients", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lab = prepared(CNN, options.algorithm, dataset(CNN))
    wrap_steps(lab, _labelled)
    train = client_round(lab)
    train(0)
    seconds = min(train(client) for client in range(1, options.clients + 1))
    with FlopCounterMode(display=False) as counter:  # products and convolutions
        train(0)
    flops, peak = int(counter.get_total_flops()), matmul_peak()
    write_result(
        algorithm=options.algorithm,
        step_seconds=seconds / CNN.steps,
        shares=_shares(train),
        flop_per_step=flops / CNN.steps,
        flop_per_second=flops / seconds,
        matmul_peak=peak,
        share_of_peak=flops / seconds / peak,
        versions={"torch": torch.__version__},
    )


def _labelled(call: Callable[..., Any], label: str) -> Callable[..., Any]:
    def with_label(*arguments: Any) -> Any:
        with record_function(f"{LABEL}{label}"):
            return call(*arguments)

    return with_label


def matmul_peak(sizes: Iterable[int] = (512, 1024, 2048), seconds: float = 1.0) -> float:
    """The most floating-point operations per second of a float32 matrix product in one thread."""
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
    """Share of the time by purpose, largest first."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begun = time.perf_counter()  # wall-clock time, like the profiler's
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
    """Purpose of an operation: the hook in which it runs, else the outermost operation that has a group."""
    found = "other operations"
    while event is not None:
        if event.name.startswith(HOOK):
            return str(event.name.removeprefix(HOOK))
        found = next((group for group, names in GROUPS.items() if event.name in names), found)
        event = event.cpu_parent
    return found


if __name__ == "__main__":
    main()
