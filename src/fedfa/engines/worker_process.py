"""A worker process: receives a request, trains a client or evaluates a slice of the test set, replies.

Requests and replies are JSON over a pipe; their tensors are in blocks of shared memory:

===========  =======================  ==========================================================================
block        written by               content
===========  =======================  ==========================================================================
broadcast    the main process         once per round: the model and the components' broadcast; read by all workers
inbox        the main process         the client state
outbox       the worker               the client's contribution and new client state; or predictions
===========  =======================  ==========================================================================
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch

from fedfa import errors
from fedfa.engines.local import LocalEngine
from fedfa.engines.shared_tensors import Block, Tree
from fedfa.errors import ClientError, FedfaError
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.context import LocalTraining

Message: TypeAlias = dict[str, Any]
"""Plain values that go over the pipe."""

_PR_SET_PDEATHSIG = 1


def serve(
    local: LocalEngine,
    connection: Connection,
    broadcast: Block,
    inbox: Block,
    outbox: Block,
    inherited: Sequence[Connection | Block] = (),
) -> None:
    """Main function of a worker; it ends when the main process closes its end of the pipe, or dies.

    A forked process must close what it has ``inherited``. With a copy of the main process's end of a pipe, no worker
    would notice the main process's death; with other workers' blocks, their memory would outlive them.
    """
    _detach_from_main_process(inherited)
    torch.set_num_threads(1)
    received: tuple[Message, dict[str, Any]] = {}, {}

    def reply(work: Callable[[], tuple[Message, Tree]]) -> None:
        try:
            values, tensors = work()
            message = {"values": values, "tensors": outbox.write(tensors)}
        except Exception as error:
            message = {"error": encode_error(error)}
        send(connection, message)

    def answer() -> tuple[Message, Tree]:
        nonlocal received
        if (sent := request.get("broadcast")) is not None:
            # A private view: an algorithm that changes what it received does not change it for other workers.
            received = sent["values"], broadcast.read(sent["tensors"], private=True)
        return execute(local, request, *received, inbox.read(request["tensors"]))

    reply(_try_backward)
    with suppress(EOFError, OSError):  # the main process is gone, or has closed the pipe
        while True:
            request = receive(connection)
            reply(answer)
    os._exit(0)  # skip the main process's exit handlers


def send(connection: Connection, message: Message) -> None:
    """Send a message."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """Wait for a message."""
    message: Message = json.loads(connection.recv_bytes())
    return message


def _detach_from_main_process(inherited: Sequence[Connection | Block]) -> None:
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        # Die with the thread that started this process, even in the middle of a client.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent.pid:  # it died before that call
            os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    for resource in inherited:
        resource.close()
    # Open new streams: a thread of the main process may have held the lock of the old ones at the fork, and buffered
    # output would be lost when this process is killed.
    with suppress(OSError):
        sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115 - stays open
        sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115 - stays open
    gc.freeze()  # the collector would touch, and so copy, every page shared with the main process


def _try_backward() -> tuple[Message, Tree]:
    # Torch refuses a backward pass in some forked processes; report that before the first job.
    torch.ones(1, requires_grad=True).sum().backward()
    return {}, {}


def execute(
    local: LocalEngine, request: Message, values: Message, tensors: dict[str, Any], own: dict[str, Any]
) -> tuple[Message, Tree]:
    """Train a client, or evaluate a slice of the test set, with the last broadcast and the request's own tensors."""
    if "client" in request:
        (result,) = local.train(decode_plan(values, tensors), [request["client"]], lambda _: own["client_state"])
        return encode_result(result)
    first, last = request["samples"]
    return {}, local.answers(tensors["model"], tensors["broadcast"], values["client"], values["on"], first, last)


# -- encoding as plain values and tensors -----------------------------------------------------------------------------
def encode_plan(plan: RoundPlan) -> tuple[Message, Tree]:
    """Encode what all clients of a round share."""
    values = {"round": plan.round, "seed": plan.seed, "rounds": plan.rounds, "final_pass": plan.final_pass}
    # JSON has no integer keys.
    return {**values, "local": plan.local.model_dump(), "steps": list(plan.steps.items())}, {
        "model": plan.model,
        "broadcast": plan.broadcast,
    }


def decode_plan(values: Message, tensors: dict[str, Any]) -> RoundPlan:
    """The inverse of :func:`encode_plan`."""
    local, steps = LocalTraining(**values["local"]), dict(values["steps"])
    return RoundPlan(**{**values, "local": local, "steps": steps}, **tensors)


def encode_result(result: ClientResult) -> tuple[Message, Tree]:
    """Encode a client's result."""
    values = {
        "client": result.client,
        "steps": result.steps,
        "sample_steps": result.sample_steps,
        "loss": result.loss,  # JSON preserves the bits of floats
        "cpu_seconds": result.cpu_seconds,
    }
    contribution = {
        group: {"tensors": entry.tensors, "weight": entry.weight} for group, entry in result.contribution.items()
    }
    return values, {"contribution": contribution, "client_state": result.client_state}


def decode_result(values: Message, tensors: dict[str, Any]) -> ClientResult:
    """The inverse of :func:`encode_result`."""
    contribution = {group: WeightedSum(**entry) for group, entry in tensors["contribution"].items()}
    return ClientResult(contribution=contribution, client_state=tensors["client_state"], **values)


def encode_error(error: Exception) -> Message:
    """Encode an error: fedfa's own by class and arguments, others by their message."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ClientError):
        arguments = [error.client, error.round, error.stage, error.problem]
        return {"kind": "ClientError", "arguments": arguments, "trace": trace}
    if isinstance(error, FedfaError):
        return {"kind": type(error).__name__, "arguments": [str(error)], "trace": trace}
    return {"kind": None, "arguments": [f"{type(error).__name__}: {error}"], "trace": trace}


def decode_error(description: Message, other: Callable[[str], FedfaError] = FedfaError) -> FedfaError:
    """The inverse of :func:`encode_error`; the traceback is added as a note.

    Args:
        description: The encoded error.
        other: Makes an error from the message of one that is not fedfa's own.
    """
    kind = getattr(errors, description["kind"] or "", FedfaError)
    error: FedfaError = kind(*description["arguments"])
    if type(error) is FedfaError:
        error = other(str(error))
    error.add_note(f"In a worker process:\n{description['trace']}")
    return error
