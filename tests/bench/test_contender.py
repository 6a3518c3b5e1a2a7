"""Programs are really started, watched, limited and cleaned up after."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedfa.bench.contender import Contender, measure, measure_in_turns
from fedfa.bench.processes import descendants, memory_of
from fedfa.bench.record import measure_section
from fedfa.bench.sections import Section, choose, read_peers, sections
from fedfa.errors import SettingsError
from tests.processes import is_running

REPORT = "import os, json; from pathlib import Path; Path(os.environ['FEDFA_BENCH_RESULT']).write_text(json.dumps({}))"


def program(text: str, **more: object) -> Contender:
    return Contender("p", "a program", (sys.executable, "-c", text), **more)  # type: ignore[arg-type]  # of many types


def test_a_report_comes_back_with_what_the_program_was_told(tmp_path: Path) -> None:
    words = "{k: os.environ.get(k) for k in ('FEDFA_BENCH_ARRAYS', 'OWN', 'OMP_NUM_THREADS')}"
    found = measure(program(REPORT.format(words), environment={"OWN": "yes"}), tmp_path)
    assert found["FEDFA_BENCH_ARRAYS"] == str(tmp_path)
    assert found["OWN"] == "yes"
    assert found["OMP_NUM_THREADS"] is None


def test_the_threads_of_the_callers_shell_do_not_reach_a_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    text = REPORT.format("{'threads': os.environ.get('OMP_NUM_THREADS')}")
    assert measure(program(text), tmp_path)["threads"] is None
    assert measure(program(text, environment={"OMP_NUM_THREADS": "1"}), tmp_path)["threads"] == "1"


def test_a_program_that_fails_is_told_by_its_last_words(tmp_path: Path) -> None:
    assert measure(program("raise SystemExit('out of luck')"), tmp_path) == {"failed": "exit code 1: out of luck"}
    assert measure(program("pass"), tmp_path) == {"failed": "exit code 0: it said nothing"}
    missing = measure(Contender("x", "x", ("/no/such/program",)), tmp_path)
    assert missing["failed"].startswith("cannot be started")


def test_a_program_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
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


def test_contenders_take_turns_and_another_one_begins_each_time(tmp_path: Path) -> None:
    news: list[str] = []
    text = REPORT.format("{'seconds': [1.0], 'first': 2.0}")
    three = [Contender(name, name, (sys.executable, "-c", text)) for name in "abc"]
    record = measure_section(Section("s", "S", three), 2, tmp_path, news.append)
    assert [line.rpartition(" ")[2] for line in news] == ["a", "b", "c", "c", "a", "b"]
    assert [len(contender["measurements"]) for contender in record["contenders"]] == [2, 2, 2]
    assert record["about"]["cores"] >= 1


def test_peers_are_read_with_task_and_rounds_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "peers.toml"
    file.write_text(
        '[[contender]]\nname = "p"\ntitle = "P"\ncommand = ["run", "{task}", "{rounds}", "{port}"]\n'
        'rounds_in_turn = { mlp = 5 }\n\n[[contender]]\nname = "q"\ntitle = "Q"\nsections = ["mlp"]\ncommand = ["q"]\n'
    )
    assert [peer.command for peer in read_peers(file, "cnn", 6)] == [("run", "cnn", "7", "{port}")]
    assert [peer.command[:3] for peer in read_peers(file, "mlp", 6)] == [("run", "mlp", "31"), ("q",)]
    assert [peer.rounds_in_turn for peer in read_peers(file, "mlp", 6)] == [5, 1]
    for wrong in ("rounds = { mlp = 4 }", "rounds_in_turn = { cnn = 0 }", 'rounds_in_turn = { cnn = "five" }'):
        file.write_text(f'[[contender]]\nname = "p"\ntitle = "P"\ncommand = ["run"]\n{wrong}\n')
        with pytest.raises(SettingsError, match=r"peers\.toml: (unknown key rounds of|rounds_in_turn of p must be)"):
            read_peers(file, "cnn", 6)
    file.write_text('[[contender]]\nname = "p"\n')
    with pytest.raises(SettingsError, match="does not describe other simulators"):
        read_peers(file, "cnn", 6)
    with pytest.raises(SettingsError, match="no file"):
        read_peers(tmp_path / "absent.toml", "cnn", 6)


def test_the_projects_own_file_of_peers_names_three_for_either_task() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "peers.toml"
    for task in ("cnn", "mlp"):
        assert {peer.name.partition("-")[0] for peer in read_peers(file, task, 3)} == {"pfl", "flower", "fedlab"}
        for peer in read_peers(file, task, 3):
            scripts = [word for word in peer.command if word.endswith(".py")]
            assert all((file.parents[1] / script).is_file() for script in scripts)
            assert scripts


def test_a_section_that_does_not_exist_is_refused_with_the_nearest_name() -> None:
    known = sections(quick=True)
    assert [section.name for section in choose(known, ["step", "cnn"])] == ["cnn", "step"]
    assert choose(known, []) == known
    with pytest.raises(SettingsError, match=r"no benchmark 'ccn'.*cnn"):
        choose(known, ["ccn"])


def test_a_contender_that_fails_gets_a_second_chance_and_no_third(tmp_path: Path) -> None:
    once = f"""
import pathlib, sys
mark = pathlib.Path({str(tmp_path)!r}) / "tried"
if not mark.exists():
    mark.touch(); sys.exit("bad luck")
"""
    lucky = Contender(
        "lucky", "Lucky", (sys.executable, "-c", once + REPORT.format("{'seconds': [1.0], 'first': 2.0}"))
    )
    never = Contender("never", "Never", (sys.executable, "-c", "raise SystemExit('out of luck')"))
    news: list[str] = []
    record = measure_section(Section("s", "S", [lucky, never]), 1, tmp_path, news.append)
    measured = {one["name"]: one["measurements"] for one in record["contenders"]}
    assert [one.get("seconds") for one in measured["lucky"]] == [[1.0]]
    assert measured["never"] == [{"failed": "exit code 1: out of luck"}]
    assert sum("once more" in line for line in news) == 2


def taking_turns(
    name: str, journal: Path, rounds: int, *, work: float = 0.05, more: str = "", turn: int = 1
) -> Contender:
    """Each round it writes its name down when it begins and when it ends, and works for a while in between."""
    text = f"""
import os, time
from pathlib import Path
from fedfa.bench.plain import clock, report
def note(word):
    with Path({str(journal)!r}).open("a") as file:
        file.write(f"{name} {{word}}\\n")
ends = []
for number in range({rounds}):
    {more or "pass"}
    note("begins")
    time.sleep({work})
    note("ends")
    ends.append(clock())
report(ends)
"""
    return Contender(name, name.upper(), (sys.executable, "-c", text), limit=120.0, rounds_in_turn=turn)


def test_rounds_are_taken_in_turns_and_nobody_works_while_another_does(tmp_path: Path) -> None:
    journal, news = tmp_path / "journal", []
    two = [taking_turns("a", journal, 4), taking_turns("b", journal, 4)]
    measure_in_turns(two, tmp_path, lambda contender, words: news.append(f"{contender.name} {words}"))
    lines = journal.read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["begins", "ends"] * 8
    # The first round of each at its start; then turns, each time beginning with another one.
    assert [line.split()[0] for line in lines[::2]] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert news[:4] == ["a start", "b start", "b turn 1", "a turn 1"]


def test_a_turn_may_have_several_rounds_and_is_reported_as_their_average(tmp_path: Path) -> None:
    """Rounds 1 and 2 of b sleep a second longer than 3 and 4: its turns of two take 1.05 s and 0.05 s a round."""
    journal = tmp_path / "journal"
    one = taking_turns("a", journal, 3)
    two = taking_turns("b", journal, 5, more="time.sleep(number in (1, 2))", turn=2)
    of_one, of_two = measure_in_turns([one, two], tmp_path, lambda *_: None)
    begun = [line.split()[0] for line in journal.read_text().splitlines() if line.endswith("begins")]
    assert "".join(begun) == "ab" + "bba" + "abb"
    assert len(of_one["seconds"]) == len(of_two["seconds"]) == 2
    assert 1.05 <= of_two["seconds"][0] < 2
    assert 0.05 <= of_two["seconds"][1] < 1


def test_the_clock_of_a_contender_stands_still_while_others_have_their_turn(tmp_path: Path) -> None:
    """One waits 1.5 s for the other in each turn: none of its rounds holds that."""
    slow, quick = (taking_turns(n, tmp_path / "journal", 3, work=w) for n, w in (("slow", 1.5), ("quick", 0.05)))
    of_slow, of_quick = measure_in_turns([slow, quick], tmp_path, lambda *_: None)
    assert len(of_slow["seconds"]) == len(of_quick["seconds"]) == 2
    assert min(of_slow["seconds"]) >= 1.5
    assert all(0.05 <= seconds < 1.5 for seconds in of_quick["seconds"])


def test_a_contender_that_dies_in_its_turn_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    dies = taking_turns("dies", journal, 5, more='number < 2 or exit("out of luck")')
    never = Contender("never", "Never", ("/no/such/program",))
    found = measure_in_turns([dies, never, taking_turns("lives", journal, 5)], tmp_path, lambda *_: None)
    assert found[0] == {"failed": "exit code 1: out of luck"}
    assert found[1]["failed"].startswith("cannot be started")
    assert len(found[2]["seconds"]) == 4


def test_a_section_by_round_keeps_the_rounds_of_each_turn(tmp_path: Path) -> None:
    news: list[str] = []
    two = [taking_turns(name, tmp_path / "journal", 3, work=0.01) for name in "ab"]
    record = measure_section(Section("s", "S", two, by_round=True), 2, tmp_path, news.append)
    assert record["by_round"]
    assert [[len(one["seconds"]) for one in c["measurements"]] for c in record["contenders"]] == [[2, 2], [2, 2]]
    assert news[0] == "s 1/2: A: start"


def test_memory_is_looked_at_in_turns_that_are_short(tmp_path: Path) -> None:
    """It takes 256 MB after its first round; a turn is over long before the next look by the clock."""
    grows = taking_turns("grows", tmp_path / "journal", 3, work=0.01, more="block = b'x' * (2**28 * (number > 0))")
    (found,) = measure_in_turns([grows], tmp_path, lambda *_: None)
    assert found["memory_mb"] > 256


@contextlib.contextmanager
def started(text: str, number: int = 1) -> Iterator[list[int]]:
    """A program that says a line in each of its processes when it is ready; they are ended afterwards."""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            for _ in range(number):
                program.stdout.readline()
            yield descendants(program.pid)
        finally:
            for pid in descendants(program.pid):
                os.kill(pid, signal.SIGKILL)


READY = "print(flush=True)\nimport time\ntime.sleep(60)"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


@only_linux
def test_memory_of_a_program_does_not_depend_on_who_else_has_its_libraries() -> None:
    text = f"import numpy\n{READY}"
    with started(text) as one:
        alone = memory_of(one)
        with started(text) as two, started(text):
            assert memory_of(one) == pytest.approx(alone, abs=2**20)
            assert memory_of(two) == pytest.approx(alone, rel=0.1)
    assert memory_of([]) == memory_of(one) == 0


@only_linux
def test_what_relatives_share_is_counted_once() -> None:
    """A parent fills 64 MB and forks a child that only reads them."""
    fill = "import os\nblock = bytearray(os.urandom(2**26))\n"
    with started(fill + READY) as alone, started(f"{fill}os.fork()\n{READY}", 2) as family:
        assert len(family) == 2
        assert 2**26 < memory_of(alone) < 2**27
        assert memory_of(family) == pytest.approx(memory_of(alone), rel=0.2)
