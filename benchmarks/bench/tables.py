"""Records as tables of text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from benchmarks.bench.medians import Summary, median_interval, round_seconds, startup, time_ratio

Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of text under a header."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """The table in Markdown; all columns but the first are right-aligned."""
        lines = [self.header, ("---",) + ("---:",) * (len(self.header) - 1), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(record: Record) -> list[Table]:
    """All tables of a section."""
    special = {"clients": _scaling, "cohort": _scaling, "step": _step, "interleaving": _interleaving}
    common = _methods if record["section"] in ("methods", "pair") else _speeds
    found = special.get(record["section"], common)(record)
    return [*found, *_targets(record)]


def successful(contender: Record) -> list[Record]:
    """The measurements that did not fail."""
    return [one for one in contender["measurements"] if "failed" not in one]


def relative_time(record: Record, of: Record, to: Record, key: str = "seconds") -> Summary | None:
    """Ratio of the times of two contenders of a record; their ratio of speeds is that of ``to`` and ``of``."""
    # Records without the key are older; their contenders were not interleaved by round.
    return time_ratio(of["measurements"], to["measurements"], key, by_round=bool(record.get("by_round")))


def _table(record: Record, header: tuple[str, ...], cells: Callable[[Record, list[Record]], tuple[str, ...]]) -> Table:
    """A row per contender; one that always failed has the reason instead of its cells."""
    rows = []
    for contender in record["contenders"]:
        done = successful(contender)
        failed = f"failed: {contender['measurements'][-1].get('failed')}"[:120], *["–"] * (len(header) - 2)
        note = f" *({contender['note']})*" if contender["note"] else ""
        versions = sorted({one["release"] for one in done if "release" in one})
        title = f"{contender['title']}{note}{', version ' if versions else ''}{', '.join(versions)}"
        rows.append((title, *(cells(contender, done) if done else failed)))
    return Table(record["title"], header, rows)


def _text(summary: Summary | None) -> str:
    return summary.text() if summary else "–"


def _speeds(record: Record) -> list[Table]:
    reference = record["contenders"][0]

    def cells(contender: Record, done: list[Record]) -> tuple[str, ...]:
        memory = [one["memory_mb"] for one in done if one.get("memory_mb")]
        return (
            f"{median(record['sample_steps'] / round_seconds(one) for one in done):,.0f}",
            _text(relative_time(record, reference, contender)),
            f"{median(startup(one) for one in done):.1f}",
            f"{median(memory):,.0f}" if memory else "–",
        )

    relative = f"speed relative to the {reference['title'].partition(',')[0]}"
    return [_table(record, ("", "samples/s", relative, "start-up, s", "memory, MB"), cells)]


def _methods(record: Record) -> list[Table]:
    reference = record["contenders"][0]

    def cells(contender: Record, done: list[Record]) -> tuple[str, ...]:
        ratios = (relative_time(record, contender, reference, key) for key in ("seconds", "cpu_seconds"))
        return f"{median(round_seconds(one) for one in done):.2f}", *map(_text, ratios)

    title = reference["title"]
    return [_table(record, ("", "s per round", f"relative to {title}", f"CPU time, relative to {title}"), cells)]


def _interleaving(record: Record) -> list[Table]:
    (contender,) = record["contenders"]
    done = [one["cpu_seconds"] for one in successful(contender)]
    if not done:
        return [_table(record, ("", ""), lambda *_: ())]
    first = next(iter(done[0]))
    rows = []
    for name in done[0]:
        ratios = [mine / theirs for one in done for mine, theirs in zip(one[name], one[first], strict=True)]
        milliseconds = 1000 * median(median(one[name]) for one in done)
        lower, _, upper = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        relative = Summary(median(ratios), *median_interval(ratios)).text(3)
        rows.append((name, f"{milliseconds:,.0f}", relative, f"{lower:.2f}–{upper:.2f}"))
    pairs = sum(len(one[first]) for one in done)
    relative = f"relative to {first}, median of {pairs} pairs (95 % interval)"
    return [Table(record["title"], ("", "CPU ms per client and epoch", relative, "middle half of the pairs"), rows)]


def _targets(record: Record) -> list[Table]:
    contenders = {contender["name"]: contender for contender in record["contenders"]}
    rows = []
    for target in record["aims"]:
        of, to, least = contenders.get(target["of"]), contenders.get(target["to"]), target["at_least"]
        speed = relative_time(record, to, of) if of and to else None
        if of and to and speed:
            reached = "–" if least is None else "yes" if speed.median >= least else "**no**"
            target_text = "–" if least is None else f"≥ {least:.2f}"
            rows.append((f"{of['title']} / {to['title']}", speed.text(), target_text, reached))
    return [Table("Ratios of speed", ("", "ratio of speed", "target", "reached"), rows)] if rows else []


def _scaling(record: Record) -> list[Table]:
    reference = next((one for one in record["contenders"] if successful(one)), None)

    def memory(done: list[Record]) -> float:
        return float(median(one["resident_mb"] for one in done))

    def cells(contender: Record, done: list[Record]) -> tuple[str, ...]:
        assert reference is not None
        milliseconds = Summary.of([1000 * round_seconds(one) for one in done])
        return (
            milliseconds.text(0),
            _text(relative_time(record, contender, reference)),
            f"{milliseconds.median / done[0]['cohort']:.2f}",
            f"{memory(done):,.0f}",
            f"{memory(done) / memory(successful(reference)):.2f}",
            f"{median(one['setup'] - round_seconds(one) for one in done):.1f}",
        )

    header = (
        "", "ms per round", "ratio", "ms per client of the cohort", "memory without data, MB", "ratio", "set-up, s",
    )  # fmt: skip
    return [_table(record, header, cells)]


def _step(record: Record) -> list[Table]:
    done = successful(record["contenders"][0])
    if not done:
        return [_table(record, ("", ""), lambda *_: ())]

    def summary(key: str, factor: float) -> Summary:
        return Summary.of([factor * one[key] for one in done])

    shares = [(name, f"{100 * share:.1f} %") for name, share in step_shares(record).items()]
    peaks = [
        ("time of a step, ms", summary("step_seconds", 1000).text(1)),
        ("operations of a step, million", f"{done[0]['flop_per_step'] / 1e6:,.0f}"),
        ("achieved, billion per second", summary("flop_per_second", 1e-9).text(1)),
        ("fastest matrix product, billion per second", summary("matmul_peak", 1e-9).text(1)),
        ("share of that", summary("share_of_peak", 100).text(0, " %")),
    ]
    return [
        Table(record["title"], ("purpose", "share of time"), shares),
        Table("Compared with the processor's peak", ("one thread, float32", ""), peaks),
    ]


def step_shares(record: Record, least: float = 0.002) -> dict[str, float]:
    """Median share of the time by purpose, largest first, without negligible ones."""
    done = successful(record["contenders"][0])
    names = {name for one in done for name in one["shares"]}
    shares = {name: median(one["shares"].get(name, 0.0) for one in done) for name in names}
    return dict(sorted(((n, s) for n, s in shares.items() if s >= least), key=lambda item: -item[1]))
