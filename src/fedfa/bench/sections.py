"""What is measured: sections of contenders, and the ratios between them that matter."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfa.bench.contender import Contender, of_fedfa
from fedfa.bench.plain import TASKS, Task
from fedfa.errors import SettingsError
from fedfa.messages import nearest


@dataclass(frozen=True)
class Aim:
    """A ratio of speeds with the least it should be; ``of`` is so many times as fast as ``to``."""

    of: str
    to: str
    at_least: float | None = None


@dataclass(frozen=True)
class Section:
    """Contenders that run in turns.

    Attributes:
        name: For ``--only``.
        title: For people.
        contenders: The first one is what the others are compared with.
        task: What they do, where all do the same.
        aims: Ratios worth a line of their own.
        by_round: Contenders take turns by rounds, one or :attr:`Contender.rounds_in_turn` at a time, not by whole runs.
    """

    name: str
    title: str
    contenders: Sequence[Contender]
    task: Task | None = None
    aims: Sequence[Aim] = field(default_factory=tuple)
    by_round: bool = False


TURNS = {"cnn": 4, "mlp": 20, "pair": 12, "clients": 12}
QUICK_TURNS = {"cnn": 2, "mlp": 3, "pair": 2, "clients": 2}
"""Of each contender, after the warm-up round."""
WORDS = {
    "channels-last": "channels-last tensors",
    "pool-first": "pooling before ReLU",
    "fused": "the fused optimiser",
    "memory": "keeping freed memory",
}
"""The gains of the tuned loop, see :mod:`fedfa.bench.loop`."""
METHODS = ("fedavg", "fedfa", "moon", "fedproc", "scaffold")
CLIENTS = (100, 1_000, 10_000, 100_000, 1_000_000)
COHORTS = (10, 30, 100, 300, 1_000, 3_000)
COHORT = 100
"""Where the number of clients grows."""


def sections(quick: bool = False, peers: Path | None = None) -> list[Section]:
    """All sections.

    Args:
        quick: Fewer rounds and sizes: whether it works, not how fast it is.
        peers: A file that names other simulators (``benchmarks/peers.toml``).
    """
    turns = QUICK_TURNS if quick else TURNS
    others = {name: read_peers(peers, name, turns[name]) if peers else [] for name in TASKS}
    return [
        _cnn(1 + turns["cnn"], others["cnn"]),
        _tuned(1 + turns["pair"]),
        _bfloat16(1 + turns["cnn"]),
        _gains(1 + turns["cnn"]),
        _mlp(turns["mlp"], others["mlp"]),
        _methods(1 + turns["cnn"]),
        _pair(1 + turns["pair"]),
        _turns(quick),
        *_scaling(turns["clients"], quick),
        Section(
            "step",
            "One step of FedFA on the paper's CNN, one thread",
            [of_fedfa("fedfa", "FedFA", "step_profile", "--algorithm", "fedfa")],
        ),
    ]


def choose(known: Sequence[Section], names: Sequence[str]) -> list[Section]:
    """The sections of these names; all if there are none.

    Raises:
        SettingsError: There is no such section.
    """
    by_name = {section.name: section for section in known}
    for name in names:
        if name not in by_name:
            raise SettingsError(f"no benchmark {name!r}{nearest(name, by_name)}; there are: {', '.join(by_name)}")
    return [section for section in known if not names or section.name in names]


def _fedfa(
    name: str, title: str, task: Task, rounds: int, *assignments: str, note: str = "", rounds_in_turn: int = 1
) -> Contender:
    assigned = [word for assignment in assignments for word in ("--set", assignment)]
    arguments = ("--task", task.name, "--rounds", rounds, *assigned)
    return of_fedfa(name, title, "rounds", *arguments, note=note, rounds_in_turn=rounds_in_turn)


def _loop(
    name: str, title: str, task: Task, rounds: int, processes: int, *flags: str, note: str = "", rounds_in_turn: int = 1
) -> Contender:
    arguments = ("--task", task.name, "--rounds", rounds, "--processes", processes, *flags)
    return of_fedfa(name, title, "loop", *arguments, note=note, rounds_in_turn=rounds_in_turn)


def _cnn(rounds: int, peers: list[Contender]) -> Section:
    task = TASKS["cnn"]
    contenders = [
        _loop("loop", "plain torch loop, 2 processes", task, rounds, 2),
        _loop("tuned", "tuned torch loop, 2 processes", task, rounds, 2, "--tuned"),
        _fedfa("fedavg-1", "fedfa, FedAvg, 1 worker", task, rounds, "engine.workers=1"),
        _fedfa("fedavg-2", "fedfa, FedAvg, 2 workers", task, rounds, "engine.workers=2"),
        _fedfa("fedfa-2", "fedfa, FedFA, 2 workers", task, rounds, "engine.workers=2", "algorithm.recipe=fedfa"),
        of_fedfa(
            "fedavg-all", "fedfa, FedAvg, 2 workers, evaluating and saving", "rounds", "--task", "cnn",
            "--rounds", rounds, "--set", "engine.workers=2", "--everything", note="every round; the others do neither",
        ),
        *peers,
    ]  # fmt: skip
    aims = [
        Aim("fedavg-2", "tuned", 0.95),
        Aim("fedavg-2", "pfl", 1.3),
        Aim("fedavg-2", "flower", 1.8),
        Aim("fedavg-2", "fedlab"),
        Aim("fedavg-2", "fedavg-1"),
    ]
    return Section("cnn", "The paper's CNN on Fashion-MNIST, 10 of 100 clients", contenders, task, aims, by_round=True)


def _tuned(rounds: int) -> Section:
    """The closest of these ratios, of the two alone and longer: enough pairs of rounds to tell a few per cent."""
    task = TASKS["cnn"]
    contenders = [
        _loop("tuned", "tuned torch loop, 2 processes", task, rounds, 2, "--tuned"),
        _fedfa("fedavg-2", "fedfa, FedAvg, 2 workers", task, rounds, "engine.workers=2"),
    ]
    title = "fedfa beside the tuned loop alone: the CNN, 2 processes"
    return Section("tuned", title, contenders, task, [Aim("fedavg-2", "tuned", 0.95)], by_round=True)


def _bfloat16(rounds: int) -> Section:
    """Apart from the others, who would wait long for it on processors that have no instructions for it."""
    task = TASKS["cnn"]
    rounding = "not exact: products are rounded to 8 bits of mantissa"
    contenders = [
        _loop("tuned", "tuned torch loop, 2 processes", task, rounds, 2, "--tuned"),
        _fedfa("fedavg-2", "fedfa, FedAvg, 2 workers", task, rounds, "engine.workers=2"),
        _loop("tuned-bf16", "tuned torch loop in bfloat16", task, rounds, 2, "--tuned", "--bfloat16", note=rounding),
        _fedfa(
            "fedavg-bf16", "fedfa, FedAvg, 2 workers, bfloat16", task, rounds, "engine.workers=2",
            "local.precision=bfloat16", note=rounding,
        ),
    ]  # fmt: skip
    aims = [Aim("fedavg-bf16", "fedavg-2")]
    return Section("bfloat16", "The same CNN in bfloat16", contenders, task, aims, by_round=True)


def _gains(rounds: int) -> Section:
    task = TASKS["cnn"]
    contenders = [
        _loop("tuned", "tuned torch loop, 2 processes", task, rounds, 2, "--tuned"),
        *(
            _loop(gain, f"without {words}", task, rounds, 2, "--tuned", "--without", gain)
            for gain, words in WORDS.items()
        ),
        _loop("loop", "without any: the plain loop", task, rounds, 2),
    ]
    return Section("gains", "What each gain is worth: the tuned loop without it", contenders, task, by_round=True)


def _mlp(turns: int, peers: list[Contender]) -> Section:
    """Rounds are short, so a turn has several: about as long for each, with more of them for the stacked clients."""
    task, turn = TASKS["mlp"], 5
    rounds, longer = 1 + turns * turn, 5 * turn
    contenders = [
        _loop("loop", "plain torch loop, 1 process", task, rounds, 1, rounds_in_turn=turn),
        _loop("loop-2", "plain torch loop, 2 processes", task, rounds, 2, rounds_in_turn=turn),
        _fedfa("each", "fedfa, clients one by one", task, rounds, "engine.workers=1", "engine.execution=each",
               rounds_in_turn=turn),
        _fedfa("each-2", "fedfa, clients one by one, 2 workers", task, rounds, "engine.workers=2",
               "engine.execution=each", rounds_in_turn=turn),
        _fedfa("stacked", "fedfa, clients stacked", task, 1 + turns * longer, "engine.workers=1",
               "engine.execution=stacked", rounds_in_turn=longer),
        *peers,
    ]  # fmt: skip
    aims = [
        Aim("stacked", "loop", 6),
        Aim("stacked", "loop-2"),
        Aim("stacked", "pfl", 6),
        Aim("stacked", "pfl-1", 6),
        Aim("stacked", "each"),
    ]
    title = "A tiny MLP (64-32-10) on the 8×8 digits, 10 of 100 clients"
    return Section("mlp", title, contenders, task, aims, by_round=True)


def _of_methods(names: Sequence[str], rounds: int) -> list[Contender]:
    """The same ten clients in every round: so what clients keep from round to round is always there."""
    task = TASKS["cnn"]
    return [
        of_fedfa(
            name, name, "rounds", "--task", task.name, "--rounds", rounds, "--clients", task.cohort,
            "--set", "engine.workers=2", "--set", f"algorithm.recipe={name}",
        )
        for name in names
    ]  # fmt: skip


def _methods(rounds: int) -> Section:
    title = "What methods cost: the CNN, the same 10 clients in every round, 2 workers"
    return Section("methods", title, _of_methods(METHODS, rounds), TASKS["cnn"], by_round=True)


def _pair(rounds: int) -> Section:
    """The two alone, and longer: enough pairs of rounds to tell a few per cent."""
    # A round of at most 1.05 times FedAvg's is a speed of at least 1/1.05.
    aims = [Aim("fedfa", "fedavg", 1 / 1.05)]
    title = "FedFA beside FedAvg: the CNN, the same 10 clients in every round, 2 workers"
    return Section("pair", title, _of_methods(("fedavg", "fedfa"), rounds), TASKS["cnn"], aims, by_round=True)


def _turns(quick: bool) -> Section:
    arguments = ("--methods", *METHODS, "--turns", 5 if quick else 60)
    contender = of_fedfa("turns", "all in turns", "turns", *arguments)
    return Section(
        "turns", "What methods cost: a client's epoch of each in turns, one process, one thread", [contender]
    )


def _scaling(turns: int, quick: bool) -> list[Section]:
    def contender(clients: int, cohort: int, rounds: int, turn: int = 1) -> Contender:
        title = f"{clients:,} clients, {cohort:,} a round"
        arguments = ("--clients", clients, "--cohort", cohort, "--rounds", rounds)
        return of_fedfa(f"{clients}/{cohort}", title, "scaling", *arguments, rounds_in_turn=turn)

    clients, cohorts = (CLIENTS[::2], COHORTS[::2]) if quick else (CLIENTS, COHORTS)
    turn = 10
    return [
        Section(
            "clients",
            f"Number of clients, {COHORT} a round",
            [contender(number, COHORT, 1 + turns * turn, turn) for number in clients],
            by_round=True,
        ),
        Section(
            "cohort",
            f"Clients a round, of {CLIENTS[-1]:,}",
            [contender(CLIENTS[-1], size, 3 if quick else 5) for size in cohorts],
        ),
    ]


def read_peers(file: Path, section: str, turns: int) -> list[Contender]:
    """The other simulators that take part in a section, each with so many turns.

    Raises:
        SettingsError: The file cannot be read or lacks something.
    """
    try:
        entries: list[Mapping[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))["contender"]
        return [_peer(entry, section, turns) for entry in entries if section in entry.get("sections", [section])]
    except FileNotFoundError:
        raise SettingsError(f"no file {file} of other simulators; the project has benchmarks/peers.toml") from None
    except SettingsError as error:
        raise SettingsError(f"{file}: {error}") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{file} does not describe other simulators: {type(error).__name__}: {error}") from None


def _peer(entry: Mapping[str, Any], section: str, turns: int) -> Contender:
    known = {"name", "title", "command", "sections", "environment", "rounds_in_turn"}
    if unknown := set(entry) - known:
        raise SettingsError(
            f"unknown key {', '.join(sorted(unknown))} of a simulator; allowed: {', '.join(sorted(known))}"
        )
    turn = entry.get("rounds_in_turn", {}).get(section, 1)
    if type(turn) is not int or turn < 1:
        raise SettingsError(f"rounds_in_turn of {entry['name']} must be a whole number from 1 on, not {turn!r}")
    words = {"{task}": section, "{rounds}": str(1 + turns * turn)}
    command = list(entry["command"])
    for mark, value in words.items():
        command = [word.replace(mark, value) for word in command]
    environment = entry.get("environment", {})
    return Contender(entry["name"], entry["title"], tuple(command), environment=environment, rounds_in_turn=turn)
