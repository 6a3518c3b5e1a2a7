"""The records as tables of text; the same for the screen and for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from fedfa.bench.figures import Figure, median_interval, pairs, ratio, round_seconds, startup, summary, throughput

Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of text under a header."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """As Markdown; all columns but the first to the right."""
        lines = [self.header, ("---",) + ("---:",) * (len(self.header) - 1), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(record: Record) -> list[Table]:
    """All tables of a section."""
    if record["section"] in ("clients", "cohort"):
        return [_scaling(record)]
    if record["section"] == "step":
        return _step(record)
    if record["section"] == "turns":
        return [_turns(record)]
    found = [_methods(record) if record["section"] in ("methods", "pair") else _contest(record)]
    if aims := _aims(record):
        found.append(aims)
    return found


def good(contender: Record) -> list[Record]:
    """The measurements that did not fail."""
    return [one for one in contender["measurements"] if "failed" not in one]


def named(record: Record) -> dict[str, Record]:
    """Contenders by name."""
    return {contender["name"]: contender for contender in record["contenders"]}


def by_round(record: Record) -> bool:
    """Whether the contenders took turns round by round (in older records they never did)."""
    return bool(record.get("by_round"))


def _contest(record: Record) -> Table:
    reference = record["contenders"][0]
    rows = []
    for contender in record["contenders"]:
        done = good(contender)
        title = contender["title"] + (f" *({contender['note']})*" if contender["note"] else "")
        releases = {one["release"] for one in done if "release" in one}
        if releases:
            title = f"{title}, version {', '.join(sorted(releases))}"
        if not done:
            rows.append((title, f"failed: {contender['measurements'][-1]['failed']}"[:120], "–", "–", "–"))
            continue
        speed = Figure.of([throughput(one, record["sample_steps"]) for one in done])
        against = ratio(contender["measurements"], reference["measurements"], by_round=by_round(record))
        memory = [one["memory_mb"] for one in done if one.get("memory_mb")]
        rows.append(
            (
                title,
                f"{speed.middle:,.0f}",
                against.text() if against else "–",
                f"{Figure.of([startup(one) for one in done]).middle:.1f}",
                f"{Figure.of(memory).middle:,.0f}" if memory else "–",
            )
        )
    header = ("", "samples/s", f"against the {reference['title'].partition(',')[0]}", "start-up, s", "memory, MB")
    return Table(record["title"], header, rows)


def _methods(record: Record) -> Table:
    reference = record["contenders"][0]
    rows = []
    for contender in record["contenders"]:
        done = good(contender)
        if not done:
            rows.append((contender["title"], f"failed: {contender['measurements'][-1]['failed']}"[:120], "–", "–"))
            continue
        both, each = (contender["measurements"], reference["measurements"]), by_round(record)
        longer, work = (
            summary([mine / theirs for mine, theirs in pairs(*both, key, by_round=each)], by_round=each)
            for key in ("seconds", "cpu_seconds")
        )
        rows.append(
            (
                contender["title"],
                f"{Figure.of([round_seconds(one) for one in done]).middle:.2f}",
                longer.text() if longer else "–",
                work.text() if work else "–",
            )
        )
    header = ("", "seconds a round", f"against {reference['title']}", "processor time of the clients, likewise")
    return Table(record["title"], header, rows)


def _turns(record: Record) -> Table:
    (contender,) = record["contenders"]
    done = [one["cpu_seconds"] for one in good(contender)]
    if not done:
        return Table(record["title"], ("", ""), [("failed", contender["measurements"][-1]["failed"])])
    first = next(iter(done[0]))
    rows = []
    for name in done[0]:
        ratios = [mine / theirs for one in done for mine, theirs in zip(one[name], one[first], strict=True)]
        milliseconds = Figure.of([1000 * median(one[name]) for one in done]).middle
        low, high = median_interval(ratios)
        lower, _, upper = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        share = f"{median(ratios):.3f} ({low:.3f}–{high:.3f})"
        rows.append((name, f"{milliseconds:,.0f}", share, f"{lower:.2f}–{upper:.2f}"))
    turns = sum(len(one[first]) for one in done)
    header = (
        "",
        "ms a client",
        f"against {first} in the same turn: median of {turns} turns (95 % interval of the median)",
        "middle half of the turns",
    )
    return Table(record["title"], header, rows)


def _aims(record: Record) -> Table | None:
    contenders = named(record)
    rows = []
    for aim in record["aims"]:
        if aim["of"] not in contenders or aim["to"] not in contenders:
            continue
        of, to = contenders[aim["of"]], contenders[aim["to"]]
        found = ratio(of["measurements"], to["measurements"], by_round=by_round(record))
        if found is None:
            continue
        wanted = aim["at_least"]
        verdict = "–" if wanted is None else "yes" if found.middle >= wanted else "**no**"
        least = "–" if wanted is None else f"≥ {wanted:.2f}"
        rows.append((f"{of['title']} against {to['title']}", found.text(), least, verdict))
    return Table("Ratios of speed", ("", "times as fast", "aim", "met"), rows) if rows else None


def _scaling(record: Record) -> Table:
    base: Record | None = None
    each = by_round(record)
    rows = []
    for contender in record["contenders"]:
        done = good(contender)
        if not done:
            rows.append((contender["title"], f"failed: {contender['measurements'][-1]['failed']}"[:120], *"–––––"))
            continue
        seconds = Figure.of([round_seconds(one) for one in done])
        memory = Figure.of([one["resident_mb"] for one in done])
        setup = Figure.of([one["setup"] - round_seconds(one) for one in done])
        base = base or {"memory": memory.middle, "measurements": contender["measurements"]}
        beside = pairs(contender["measurements"], base["measurements"], by_round=each)
        longer = summary([mine / theirs for mine, theirs in beside], by_round=each)
        rows.append(
            (
                contender["title"],
                f"{1000 * seconds.middle:,.0f} ({1000 * seconds.low:,.0f}–{1000 * seconds.high:,.0f})",
                longer.text() if longer else "–",
                f"{1000 * seconds.middle / done[0]['cohort']:.2f}",
                f"{memory.middle:,.0f}",
                f"{memory.middle / base['memory']:.2f}",
                f"{setup.middle:.1f}",
            )
        )
    header = (
        "", "ms a round", "ratio", "ms per client of the cohort", "memory without data, MB", "ratio", "set-up, s",
    )  # fmt: skip
    return Table(record["title"], header, rows)


def _step(record: Record) -> list[Table]:
    (contender,) = record["contenders"]
    done = good(contender)
    if not done:
        return [Table(record["title"], ("", ""), [("failed", contender["measurements"][-1]["failed"])])]
    shares = step_shares(record)
    rows = [(name, f"{100 * share:.1f} %") for name, share in shares.items()]
    milliseconds = Figure.of([1000 * one["step_seconds"] for one in done])
    speed = Figure.of([one["flop_per_second"] / 1e9 for one in done])
    peak = Figure.of([one["matmul_peak"] / 1e9 for one in done])
    of_peak = Figure.of([100 * one["share_of_peak"] for one in done])
    peaks = [
        ("time of a step, ms", milliseconds.text(1)),
        ("operations of a step, million", f"{done[0]['flop_per_step'] / 1e6:,.0f}"),
        ("reached, billion a second", speed.text(1)),
        ("best product of two matrices, billion a second", peak.text(1)),
        ("share of that", of_peak.text(0, " %")),
    ]
    return [
        Table(record["title"], ("what the time is for", "share"), rows),
        Table("Against the peak of the processor", ("one thread, float32", ""), peaks),
    ]


def step_shares(record: Record, least: float = 0.002) -> dict[str, float]:
    """Median share of each kind of work; what is too small to see is left to the others."""
    done = good(record["contenders"][0])
    names = {name for one in done for name in one["shares"]}
    middle = {name: Figure.of([one["shares"].get(name, 0.0) for one in done]).middle for name in names}
    shown = {name: share for name, share in middle.items() if share >= least}
    return dict(sorted(shown.items(), key=lambda item: -item[1]))
