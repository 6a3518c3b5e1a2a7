"""Contenders are real processes here: started, interleaved, limited in time, killed with all they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.contender import Contender, measure_interleaved
from benchmarks.bench.processes import memory_of, process_tree
from benchmarks.bench.records import measure_section
from benchmarks.bench.sections import Section, choose, read_peers, sections
from fedfa.errors import ConfigError
from tests.processes import is_running

pytestmark = pytest.mark.system

REPORT = "import os, json; from pathlib import Path; Path(os.environ['FEDFA_BENCH_RESULT']).write_text(json.dumps({}))"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a program that never stops at its gate is noticed at the next sample."""
    monkeypatch.setattr("benchmarks.bench.contender.SAMPLE_SECONDS", 0.1)


def program(text: str, **more: object) -> Contender:
    return Contender("p", "a program", (sys.executable, "-c", text), **more)  # type: ignore[arg-type]  # of many types


def measure(contender: Contender, arrays: Path) -> dict[str, Any]:
    (report,) = measure_interleaved([contender], arrays, lambda _: None)
    return report


def test_a_contender_gets_its_environment_and_its_report_is_returned(tmp_path: Path) -> None:
    values = "{k: os.environ.get(k) for k in ('FEDFA_BENCH_ARRAYS', 'OWN', 'OMP_NUM_THREADS')}"
    found = measure(program(REPORT.format(values), environment={"OWN": "yes"}), tmp_path)
    assert found["FEDFA_BENCH_ARRAYS"] == str(tmp_path)
    assert found["OWN"] == "yes"
    assert found["OMP_NUM_THREADS"] is None


def test_the_callers_omp_num_threads_does_not_reach_a_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    text = REPORT.format("{'threads': os.environ.get('OMP_NUM_THREADS')}")
    assert measure(program(text), tmp_path)["threads"] is None
    assert measure(program(text, environment={"OMP_NUM_THREADS": "1"}), tmp_path)["threads"] == "1"


def test_a_failed_contender_is_reported_with_its_last_line_of_output(tmp_path: Path) -> None:
    assert measure(program("raise SystemExit('out of disk')"), tmp_path) == {"failed": "exit code 1: out of disk"}
    assert measure(program("pass"), tmp_path) == {"failed": "exit code 0: no output"}
    missing = measure(Contender("x", "x", ("/no/such/program",)), tmp_path)
    assert missing["failed"].startswith("cannot be started")


def test_a_hanging_contender_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """It waits for a child that would sleep for minutes; its limit is one second."""
    note = tmp_path / "child"
    text = (
        "import subprocess, sys, pathlib; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']);"
        f"pathlib.Path({str(note)!r}).write_text(str(c.pid)); c.wait()"
    )
    begun = time.monotonic()
    found = measure(program(text, limit=3.0), tmp_path)
    assert time.monotonic() - begun < 60
    assert found["failed"].startswith("not done after 3 s")
    child = int(note.read_text())
    for _ in range(100):
        if not is_running(child):
            break
        time.sleep(0.05)
    assert not is_running(child)


def test_each_repetition_starts_with_another_contender(tmp_path: Path) -> None:
    news: list[str] = []
    text = REPORT.format("{'seconds': [1.0], 'first': 2.0}")
    three = [Contender(name, name, (sys.executable, "-c", text)) for name in "abc"]
    record = measure_section(Section("s", "S", three), 2, tmp_path, news.append)
    assert [line.split(": ")[1] for line in news] == ["a", "b", "c", "c", "a", "b"]
    assert [len(contender["measurements"]) for contender in record["contenders"]] == [2, 2, 2]
    assert record["about"]["cores"] >= 1


def test_peers_have_task_and_rounds_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "peers.toml"
    file.write_text(
        '[[contender]]\nname = "p"\ntitle = "P"\ncommand = ["run", "{task}", "{rounds}", "{port}"]\n'
        'rounds_per_slot = { mlp = 5 }\n\n[[contender]]\nname = "q"\ntitle = "Q"\nsections = ["mlp"]\ncommand = ["q"]\n'
    )
    assert [peer.command for peer in read_peers(file, "cnn", 6)] == [("run", "cnn", "7", "{port}")]
    assert [peer.command[:3] for peer in read_peers(file, "mlp", 6)] == [("run", "mlp", "31"), ("q",)]
    assert [peer.rounds_per_slot for peer in read_peers(file, "mlp", 6)] == [5, 1]
    for wrong in ("rounds = { mlp = 4 }", "rounds_per_slot = { cnn = 0 }", 'rounds_per_slot = { cnn = "five" }'):
        file.write_text(f'[[contender]]\nname = "p"\ntitle = "P"\ncommand = ["run"]\n{wrong}\n')
        with pytest.raises(ConfigError, match=r"peers\.toml: (unknown key rounds;|rounds_per_slot of p must be)"):
            read_peers(file, "cnn", 6)
    file.write_text('[[contender]]\nname = "p"\n')
    with pytest.raises(ConfigError, match="is not a list of simulators"):
        read_peers(file, "cnn", 6)
    with pytest.raises(ConfigError, match="no file"):
        read_peers(tmp_path / "absent.toml", "cnn", 6)


def test_the_projects_peers_are_three_simulators_for_either_task() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "peers.toml"
    for task in ("cnn", "mlp"):
        assert {peer.name.partition("-")[0] for peer in read_peers(file, task, 3)} == {"pfl", "flower", "fedlab"}
        for peer in read_peers(file, task, 3):
            scripts = [word for word in peer.command if word.endswith(".py")]
            assert all((file.parents[1] / script).is_file() for script in scripts)
            assert scripts


def test_an_unknown_section_is_refused_with_the_nearest_name() -> None:
    known = sections(quick=True)
    assert [section.name for section in choose(known, ["step", "cnn"])] == ["cnn", "step"]
    assert choose(known, []) == known
    with pytest.raises(ConfigError, match=r"no section 'ccn'.*cnn"):
        choose(known, ["ccn"])


def test_a_failed_contender_is_started_once_more_and_not_a_third_time(tmp_path: Path) -> None:
    once = f"""
import pathlib, sys
mark = pathlib.Path({str(tmp_path)!r}) / "tried"
if not mark.exists():
    mark.touch(); sys.exit("no port")
"""
    second = Contender(
        "second", "Second", (sys.executable, "-c", once + REPORT.format("{'seconds': [1.0], 'first': 2.0}"))
    )
    never = Contender("never", "Never", (sys.executable, "-c", "raise SystemExit('out of disk')"))
    news: list[str] = []
    record = measure_section(Section("s", "S", [second, never]), 1, tmp_path, news.append)
    measured = {one["name"]: one["measurements"] for one in record["contenders"]}
    assert [one.get("seconds") for one in measured["second"]] == [[1.0]]
    assert measured["never"] == [{"failed": "exit code 1: out of disk"}]
    assert sum("once more" in line for line in news) == 2


def rounds_of(name: str, journal: Path, rounds: int, *, work: float = 0.05, more: str = "", slot: int = 1) -> Contender:
    """A contender that writes a line to the journal when a round begins and ends, and sleeps in between."""
    text = f"""
import os, time
from pathlib import Path
from benchmarks.bench.contender_api import clock, report
def note(event):
    with Path({str(journal)!r}).open("a") as file:
        file.write(f"{name} {{event}}\\n")
ends = []
for number in range({rounds}):
    {more or "pass"}
    note("begins")
    time.sleep({work})
    note("ends")
    ends.append(clock())
report(ends)
"""
    return Contender(name, name.upper(), (sys.executable, "-c", text), limit=120.0, rounds_per_slot=slot)


def test_rounds_are_interleaved_and_one_contender_trains_at_a_time(tmp_path: Path) -> None:
    journal, news = tmp_path / "journal", list[str]()
    two = [rounds_of("a", journal, 4), rounds_of("b", journal, 4)]
    measure_interleaved(two, tmp_path, news.append)
    lines = journal.read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["begins", "ends"] * 8
    # The first round of each at its start; then slots, every time in another order.
    assert [line.split()[0] for line in lines[::2]] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert news[:4] == ["A: start", "B: start", "B: slot 1", "A: slot 1"]


def test_a_slot_of_several_rounds_is_reported_as_their_mean(tmp_path: Path) -> None:
    """Rounds 1 and 2 of b sleep a second longer than 3 and 4: its slots of two take 1.05 s and 0.05 s a round."""
    journal = tmp_path / "journal"
    one = rounds_of("a", journal, 3)
    two = rounds_of("b", journal, 5, more="time.sleep(number in (1, 2))", slot=2)
    of_one, of_two = measure_interleaved([one, two], tmp_path, lambda _: None)
    begun = [line.split()[0] for line in journal.read_text().splitlines() if line.endswith("begins")]
    assert "".join(begun) == "ab" + "bba" + "abb"
    assert len(of_one["seconds"]) == len(of_two["seconds"]) == 2
    assert 1.05 <= of_two["seconds"][0] < 2
    assert 0.05 <= of_two["seconds"][1] < 1


def test_the_clock_excludes_the_slots_of_other_contenders(tmp_path: Path) -> None:
    """One waits 1.5 s for the other in each slot: none of its rounds includes that."""
    slow, quick = (rounds_of(n, tmp_path / "journal", 3, work=w) for n, w in (("slow", 1.5), ("quick", 0.05)))
    of_slow, of_quick = measure_interleaved([slow, quick], tmp_path, lambda _: None)
    assert len(of_slow["seconds"]) == len(of_quick["seconds"]) == 2
    assert min(of_slow["seconds"]) >= 1.5
    assert all(0.05 <= seconds < 1.5 for seconds in of_quick["seconds"])


def test_a_contender_that_fails_in_its_slot_does_not_stop_the_others(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    dies = rounds_of("dies", journal, 5, more='number < 2 or exit("out of disk")')
    never = Contender("never", "Never", ("/no/such/program",))
    found = measure_interleaved([dies, never, rounds_of("lives", journal, 5)], tmp_path, lambda _: None)
    assert found[0] == {"failed": "exit code 1: out of disk"}
    assert found[1]["failed"].startswith("cannot be started")
    assert len(found[2]["seconds"]) == 4


def test_a_section_records_every_slot(tmp_path: Path) -> None:
    news: list[str] = []
    two = [rounds_of(name, tmp_path / "journal", 3, work=0.01) for name in "ab"]
    record = measure_section(Section("s", "S", two), 2, tmp_path, news.append)
    assert record["by_round"]
    assert [[len(one["seconds"]) for one in c["measurements"]] for c in record["contenders"]] == [[2, 2], [2, 2]]
    assert news[0] == "s 1/2: A: start"


def test_memory_is_sampled_in_short_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 256 MB after its first round; a slot is much shorter than SAMPLE_SECONDS."""
    monkeypatch.setattr("benchmarks.bench.contender.SAMPLE_SECONDS", 3.0)
    grows = rounds_of("grows", tmp_path / "journal", 3, work=0.01, more="block = b'x' * (2**28 * (number > 0))")
    (found,) = measure_interleaved([grows], tmp_path, lambda _: None)
    assert found["memory_mb"] > 256


@contextlib.contextmanager
def started(text: str, number: int = 1) -> Iterator[set[int]]:
    """A program whose processes each print a line when ready; they are killed afterwards."""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            for _ in range(number):
                program.stdout.readline()
            yield process_tree(program.pid)
        finally:
            for pid in process_tree(program.pid):
                os.kill(pid, signal.SIGKILL)


READY = "print(flush=True)\nimport time\ntime.sleep(60)"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


@only_linux
def test_memory_does_not_depend_on_other_programs_with_the_same_libraries() -> None:
    text = f"import numpy\n{READY}"
    with started(text) as one:
        alone = memory_of(one)
        with started(text) as two, started(text):
            assert memory_of(one) == pytest.approx(alone, abs=2**20)
            assert memory_of(two) == pytest.approx(alone, rel=0.1)
    assert memory_of([]) == memory_of(one) == 0


@only_linux
def test_memory_shared_in_a_process_tree_is_counted_once() -> None:
    """A parent fills 64 MB and forks a child that only reads them."""
    fill = "import os\nblock = bytearray(os.urandom(2**26))\n"
    with started(fill + READY) as alone, started(f"{fill}os.fork()\n{READY}", 2) as family:
        assert len(family) == 2
        assert 2**26 < memory_of(alone) < 2**27
        assert memory_of(family) == pytest.approx(memory_of(alone), rel=0.2)
