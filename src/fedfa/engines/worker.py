"""A worker process: waits for a request, trains a client or evaluates on a piece of the test set, replies.

Requests and replies are JSON over a pipe; the tensors that belong to them lie in blocks of shared memory:

===========  =======================  ==========================================================================
block        written by               holds
===========  =======================  ==========================================================================
broadcast    the main process         once per round: the model and what the parts send; all workers read it
inbox        the main process         what the client kept from earlier rounds
outbox       the worker               the client's sums and what it keeps now; or answers to test samples
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch

from fedfa import errors
from fedfa.engines.local import LocalEngine
from fedfa.engines.shared_tensors import Block, Tree
from fedfa.errors import ClientError, FedfaError
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.part import LocalTraining
from fedfa.learning.sums import WeightedSum

Message: TypeAlias = dict[str, Any]
"""What goes over the pipe: plain values only."""

_PR_SET_PDEATHSIG = 1


def serve(
    local: LocalEngine,
    connection: Connection,
    broadcast: Block,
    inbox: Block,
    outbox: Block,
    not_ours: Sequence[Connection | Block] = (),
) -> None:
    """The life of a worker; ends when the main process closes its end of the pipe, or is no more.

    Args:
        local: Does the work.
        connection: Requests and replies.
        broadcast: See the module's text.
        inbox: See the module's text.
        outbox: See the module's text.
        not_ours: What a forked process has but must not hold. With a copy of the main process's end of a pipe nobody
            would see that it is gone; with other workers' blocks their memory would outlive them.
    """
    _leave_the_main_process(not_ours)
    torch.set_num_threads(1)
    worker = _Worker(local, broadcast, inbox, outbox)
    # What stands in the way of training in this process (torch refuses a backward pass in some forked ones) shows here.
    send(connection, worker.guarded(_try_out))
    with suppress(EOFError, OSError):  # the main process is gone, or wants no more
        while True:
            request = receive(connection)
            send(connection, worker.guarded(worker.answer, request))
    os._exit(0)  # nothing of what the main process registered for its own end is to run here


def send(connection: Connection, message: Message) -> None:
    """Put a message on the pipe."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """Wait for a message."""
    message: Message = json.loads(connection.recv_bytes())
    return message


def _leave_the_main_process(not_ours: Sequence[Connection | Block]) -> None:
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        # Ends this process with the thread that started it: also in the middle of a client, and however that happened.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent.pid:  # it ended before that call
            os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    for thing in not_ours:
        thing.close()
    # New streams for what a network or a method may print: a thread of the main process may have held the lock of the
    # old ones when this process was forked, and what waits in a buffer would be lost when it is killed.
    with suppress(OSError):
        sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115 - stays open
        sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115 - stays open
    gc.freeze()  # the collector would touch, and so copy, every page of objects that is shared with the main process


def _try_out() -> tuple[Message, Tree]:
    # A backward pass is what may not survive a fork.
    torch.ones(1, requires_grad=True).sum().backward()
    return {}, {}


class _Worker:
    """Answers requests."""

    def __init__(self, local: LocalEngine, broadcast: Block, inbox: Block, outbox: Block) -> None:
        self._local, self._broadcast, self._inbox, self._outbox = local, broadcast, inbox, outbox
        self._sent: tuple[Message, dict[str, Any]] = {}, {}

    def guarded(self, work: Any, *arguments: Any) -> Message:
        """The reply to a request: values and where the tensors are, or what went wrong."""
        try:
            values, tensors = work(*arguments)
            return {"values": values, "tensors": self._outbox.write(tensors)}
        except Exception as error:
            return {"error": describe_error(error)}

    def answer(self, request: Message) -> tuple[Message, Tree]:
        """Do what is asked for."""
        if (sent := request.get("broadcast")) is not None:
            # A private view: a method that changes what it received does not change it for other workers.
            self._sent = sent["values"], self._broadcast.read(sent["tensors"], private=True)
        return carry_out(self._local, request, *self._sent, self._inbox.read(request["tensors"]))


def carry_out(
    local: LocalEngine, request: Message, values: Message, tensors: dict[str, Any], own: dict[str, Any]
) -> tuple[Message, Tree]:
    """Train a client, or evaluate on a piece of the test set.

    Args:
        local: Does the work.
        request: What is asked for.
        values: What all workers were told last, the plain part of it.
        tensors: Its tensors.
        own: The tensors that came with the request.
    """
    if "client" in request:
        (result,) = local.train(plan_from(values, tensors), [request["client"]], lambda _: own["kept"])
        return describe_result(result)
    first, last = request["samples"]
    return {}, local.answers(tensors["model"], tensors["received"], values["client"], first, last)


# -- the forms in which things travel ---------------------------------------------------------------------------------
def describe_plan(plan: RoundPlan) -> tuple[Message, Tree]:
    """What all clients of a round have in common, as plain values and tensors."""
    values = {"round": plan.round, "seed": plan.seed, "rounds": plan.rounds, "survey": plan.survey}
    return {**values, "local": asdict(plan.local)}, {"model": plan.model, "received": plan.received}


def plan_from(values: Message, tensors: dict[str, Any]) -> RoundPlan:
    """The inverse of :func:`describe_plan`."""
    return RoundPlan(
        round=values["round"],
        model=tensors["model"],
        received=tensors["received"],
        local=LocalTraining(**values["local"]),
        seed=values["seed"],
        rounds=values["rounds"],
        survey=values["survey"],
    )


def describe_result(result: ClientResult) -> tuple[Message, Tree]:
    """What a client hands back, as plain values and tensors."""
    values = {
        "client": result.client,
        "steps": result.steps,
        "sample_steps": result.sample_steps,
        "loss": result.loss,  # JSON writes floats so that they read back to the same bits
        "cpu_seconds": result.cpu_seconds,
    }
    sums = {group: {"tensors": entry.tensors, "weight": entry.weight} for group, entry in result.sums.items()}
    return values, {"sums": sums, "kept": result.kept}


def result_from(values: Message, tensors: dict[str, Any]) -> ClientResult:
    """The inverse of :func:`describe_result`."""
    sums = {group: WeightedSum(entry["tensors"], entry["weight"]) for group, entry in tensors["sums"].items()}
    return ClientResult(sums=sums, kept=tensors["kept"], **values)


def describe_error(error: Exception) -> Message:
    """An error of fedfa by its name and arguments, any other one by its words."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ClientError):
        arguments = [error.client, error.round, error.stage, error.problem]
        return {"kind": "ClientError", "arguments": arguments, "trace": trace}
    if isinstance(error, FedfaError):
        return {"kind": type(error).__name__, "arguments": [str(error)], "trace": trace}
    return {"kind": None, "arguments": [f"{type(error).__name__}: {error}"], "trace": trace}


def error_from(description: Message) -> FedfaError:
    """The inverse of :func:`describe_error`; where it happened is a note to the error."""
    kind = getattr(errors, description["kind"] or "FedfaError", FedfaError)
    error: FedfaError = kind(*description["arguments"])
    error.add_note(f"In a worker process:\n{description['trace']}")
    return error
