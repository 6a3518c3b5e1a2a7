"""What is measured: sections of contenders, and the ratios between them that have targets."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.bench.contender import Contender
from benchmarks.bench.contender_api import CNN, MLP, TASKS, Task
from fedfa.error_messages import nearest
from fedfa.errors import ConfigError


@dataclass(frozen=True)
class Section:
    """Contenders that are measured interleaved.

    Attributes:
        name: For ``--only``.
        title: Shown above its tables.
        contenders: The first one is the reference of the others.
        slots: How many slots each is measured in, after its warm-up round.
        quick_slots: The same for ``--quick``.
        task: The task, where all contenders train the same.
        compared: The contender whose speed is compared with others.
        targets: The others, and how many times as fast it should be at least.
    """

    name: str
    title: str
    contenders: Sequence[Contender]
    slots: int = 4
    quick_slots: int = 2
    task: Task | None = None
    compared: str = ""
    targets: Mapping[str, float | None] = field(default_factory=dict)


def _program(name: str, title: str, command: str, note: str = "", rounds_per_slot: int = 1) -> Contender:
    """A program of this package; ``command`` is its module and arguments."""
    words = (sys.executable, "-m", *f"benchmarks.bench.{command}".split())
    return Contender(name, title, words, note=note, rounds_per_slot=rounds_per_slot)


def _filled(contender: Contender, slots: int) -> Contender:
    """Fill in ``{slots}`` and ``{rounds}``."""
    rounds = 1 + slots * contender.rounds_per_slot
    command = (word.replace("{slots}", str(slots)).replace("{rounds}", str(rounds)) for word in contender.command)
    return replace(contender, command=tuple(command))


def _scaling(clients: int, cohort: int, rounds_per_slot: int) -> Contender:
    title, size = f"{clients:,} clients, {cohort:,} per round", f"--clients {clients} --cohort {cohort}"
    command = f"fedfa_rounds --task pictures --rounds {{rounds}} {size} --set engine.workers=1"
    return _program(f"{clients}/{cohort}", title, command, rounds_per_slot=rounds_per_slot)


# fmt: off
LOOP = "torch_loop --task cnn --rounds {rounds} --processes 2"
FEDFA = "fedfa_rounds --task cnn --rounds {rounds} --set engine.workers=2"
MLP_LOOP = "torch_loop --task mlp --rounds {rounds} --processes"
MLP_FEDFA = "fedfa_rounds --task mlp --rounds {rounds} --set engine.execution="
PLAIN_LOOP = _program("loop", "plain torch loop, 2 processes", LOOP)
TUNED_LOOP = _program("tuned", "tuned torch loop, 2 processes", f"{LOOP} --tuned")
FEDAVG = _program("fedavg-2", "fedfa, FedAvg, 2 workers", FEDFA)
# The same ten clients in every round, so that the client state of earlier rounds always exists.
METHODS = {
    name: _program(name, name, f"{FEDFA} --clients {CNN.cohort} --set algorithm.name={name}")
    for name in ("fedavg", "fedfa", "moon", "fedproc", "scaffold")
}
ROUNDING = "not exact: products are rounded to 8 bits of mantissa"
SECTIONS = (
    Section(
        "cnn", "The paper's CNN on Fashion-MNIST, 10 of 100 clients", [
            PLAIN_LOOP,
            TUNED_LOOP,
            _program("fedavg-1", "fedfa, FedAvg, 1 worker", FEDFA.replace("workers=2", "workers=1")),
            FEDAVG,
            _program("fedfa-2", "fedfa, FedFA, 2 workers", f"{FEDFA} --set algorithm.name=fedfa"),
            _program("fedavg-all", "fedfa, FedAvg, 2 workers, evaluating and saving", f"{FEDFA} --everything",
                     note="every round; the others do neither"),
        ],
        task=CNN, compared="fedavg-2",
        targets={"tuned": 0.95, "pfl": 1.3, "flower": 1.8, "fedlab": None, "fedavg-1": None},
    ),
    # The closest of these ratios, with enough pairs of rounds to resolve a few per cent.
    Section(
        "tuned", "fedfa and the tuned loop: the CNN, 2 processes", [TUNED_LOOP, FEDAVG], slots=12,
        task=CNN, compared="fedavg-2", targets={"tuned": 0.95},
    ),
    # Separate, because it is very slow on processors without instructions for it.
    Section(
        "bfloat16", "The same CNN in bfloat16", [
            TUNED_LOOP,
            FEDAVG,
            _program("tuned-bf16", "tuned torch loop in bfloat16", f"{LOOP} --tuned --bfloat16", ROUNDING),
            _program("fedavg-bf16", "fedfa, FedAvg, 2 workers, bfloat16", f"{FEDFA} --set local.precision=bfloat16",
                     ROUNDING),
        ],
        task=CNN, compared="fedavg-bf16", targets={"fedavg-2": None},
    ),
    Section(
        "gains", "Worth of each optimisation: the tuned loop without it", [
            TUNED_LOOP,
            _program("channels-last", "without channels-last tensors", f"{LOOP} --tuned --without channels-last"),
            _program("pool-first", "without pooling before ReLU", f"{LOOP} --tuned --without pool-first"),
            _program("fused", "without the fused optimiser", f"{LOOP} --tuned --without fused"),
            _program("memory", "without keeping freed memory", f"{LOOP} --tuned --without memory"),
            replace(PLAIN_LOOP, title="without any: the plain loop"),
        ],
        task=CNN,
    ),
    # Rounds are short, so a slot has several; stacked clients get more, so that all slots take about as long.
    Section(
        "mlp", "A small MLP (64-32-10) on the 8×8 digits, 10 of 100 clients", [
            _program("loop", "plain torch loop, 1 process", f"{MLP_LOOP} 1", rounds_per_slot=5),
            _program("loop-2", "plain torch loop, 2 processes", f"{MLP_LOOP} 2", rounds_per_slot=5),
            _program("each", "fedfa, clients one by one", f"{MLP_FEDFA}each --set engine.workers=1",
                     rounds_per_slot=5),
            _program("each-2", "fedfa, clients one by one, 2 workers", f"{MLP_FEDFA}each --set engine.workers=2",
                     rounds_per_slot=5),
            _program("stacked", "fedfa, clients stacked", f"{MLP_FEDFA}stacked --set engine.workers=1",
                     rounds_per_slot=25),
        ],
        slots=20, quick_slots=3, task=MLP, compared="stacked",
        targets={"loop": 10, "loop-2": None, "pfl": 6, "pfl-1": 6, "each": None},
    ),
    Section("methods", "Cost of methods: the CNN, the same 10 clients in every round, 2 workers",
            [*METHODS.values()], task=CNN),
    # With enough pairs of rounds for the target: a round takes at most 1.05 times as long as FedAvg's.
    Section(
        "pair", "FedFA and FedAvg: the CNN, the same 10 clients in every round, 2 workers",
        [METHODS["fedavg"], METHODS["fedfa"]], slots=12, task=CNN, compared="fedfa", targets={"fedavg": 1 / 1.05},
    ),
    Section(
        "interleaving", "Cost of methods: one epoch of a client with each in turn, one process, one thread",
        [_program("all", "all methods", f"interleaved_methods --slots {{slots}} --methods {' '.join(METHODS)}")],
        slots=60, quick_slots=5,
    ),
    Section("clients", "Number of clients, 100 per round",
            [_scaling(number, 100, 10) for number in (100, 1_000, 10_000, 100_000, 1_000_000)], slots=12),
    Section("cohort", "Clients per round, of 1,000,000",
            [_scaling(1_000_000, size, max(1, 1000 // size)) for size in (10, 30, 100, 300, 1_000, 3_000)]),
    Section("step", "One step of FedFA on the paper's CNN, one thread",
            [_program("fedfa", "FedFA", "step_profile --algorithm fedfa")]),
)
# fmt: on


def sections(quick: bool = False, peers: Path | None = None) -> list[Section]:
    """All sections, ready to be measured.

    Args:
        quick: Few slots, every second size: shows that the benchmark works, not how fast fedfa is.
        peers: File that lists other simulators (``benchmarks/peers.toml``).
    """
    found = []
    for section in SECTIONS:
        slots = section.quick_slots if quick else section.slots
        contenders = [_filled(contender, slots) for contender in section.contenders]
        if quick and section.name in ("clients", "cohort"):
            contenders = contenders[::2]
        if peers and section.name in TASKS:
            contenders += read_peers(peers, section.name, slots)
        found.append(replace(section, contenders=contenders))
    return found


def choose(known: Sequence[Section], names: Sequence[str]) -> list[Section]:
    """The sections with these names; all of them if there are no names.

    Raises:
        ConfigError: There is no such section.
    """
    by_name = {section.name: section for section in known}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"no section {name!r}{nearest(name, by_name)}; sections: {', '.join(by_name)}")
    return [section for section in known if not names or section.name in names]


def read_peers(file: Path, section: str, slots: int) -> list[Contender]:
    """The other simulators of a section.

    Args:
        file: The file that lists them.
        section: Name of the section, which is the name of its task.
        slots: Slots of each, after the warm-up round.

    Raises:
        ConfigError: The file cannot be read or lacks something.
    """
    try:
        entries: list[Mapping[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))["contender"]
        return [_peer(entry, section, slots) for entry in entries if section in entry.get("sections", [section])]
    except FileNotFoundError:
        raise ConfigError(f"no file {file}; the project's own list of simulators is benchmarks/peers.toml") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is not a list of simulators: {type(error).__name__}: {error}") from None


def _peer(entry: Mapping[str, Any], section: str, slots: int) -> Contender:
    known = {"name", "title", "command", "sections", "environment", "rounds_per_slot"}
    if unknown := set(entry) - known:
        raise ConfigError(f"unknown key {', '.join(sorted(unknown))}; allowed: {', '.join(sorted(known))}")
    rounds = entry.get("rounds_per_slot", {}).get(section, 1)
    if type(rounds) is not int or rounds < 1:
        raise ConfigError(f"rounds_per_slot of {entry['name']} must be a positive integer, not {rounds!r}")
    command = tuple(word.replace("{task}", section) for word in entry["command"])
    environment = entry.get("environment", {})
    return _filled(Contender(entry["name"], entry["title"], command, environment, rounds_per_slot=rounds), slots)
