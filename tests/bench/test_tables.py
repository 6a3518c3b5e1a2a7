"""Tables, page and figure from small records whose values can be checked by hand; the project's page is up to date."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bench import medians
from benchmarks.bench.__main__ import bench
from benchmarks.bench.contender import ROOT
from benchmarks.bench.medians import Summary, median_interval, round_seconds, startup, time_ratio
from benchmarks.bench.performance_page import refresh_page
from benchmarks.bench.performance_plot import draw
from benchmarks.bench.records import read_records, write_record
from benchmarks.bench.sections import SECTIONS
from benchmarks.bench.step_profile import HOOK, group_of
from benchmarks.bench.tables import tables
from fedfa.errors import FedfaError, RunError

ABOUT = {
    "date": "2026-01-02 03:04 UTC", "processor": "a processor", "cores": 2, "memory_gb": 8.0, "system": "a system",
    "load_before": 0.0, "versions": {"torch": "2"}, "commit": "0123456789abcdef with changes",
}  # fmt: skip


def measured(*seconds: float, first: float = 10.0, **more: Any) -> dict[str, Any]:
    return {"seconds": list(seconds), "first": first, "memory_mb": 100.0, **more}


def contender(name: str, *measurements: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "title": f"the {name}", "note": "", "measurements": list(measurements)}


def record(section: str, *contenders: dict[str, Any], aims: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "section": section, "title": f"Section {section}", "about": ABOUT, "repetitions": 3, "sample_steps": 1000,
        "aims": aims or [], "contenders": list(contenders),
    }  # fmt: skip


def test_a_measurement_is_the_median_of_its_rounds() -> None:
    one = measured(2.0, 9.0, 1.0, first=12.5)
    assert round_seconds(one) == 2.0
    assert tables(record("cnn", contender("one", one)))[0].rows[0][1] == "500"  # 1000 samples in 2 s
    assert startup(one) == 10.5  # the first round ended at 12.5; assumed to take 2.0
    assert startup({**one, "startup": 3.25}) == 3.25  # reported by the program


def test_a_ratio_pairs_measurements_of_the_same_repetition() -> None:
    """The machine is twice as slow in the second repetition, for both: the ratio is unaffected."""
    mine = [measured(1.0), measured(2.0), measured(1.1)]
    theirs = [measured(3.0), measured(6.0), measured(3.3)]
    found = time_ratio(theirs, mine)
    assert found is not None
    assert [found.median, found.low, found.high] == pytest.approx([3.0, 3.0, 3.0])


def test_a_ratio_by_round_pairs_measurements_of_the_same_slot() -> None:
    """The machine slows down from slot to slot, for both; the second repetition of one failed."""
    mine = [measured(1.0, 2.0, 4.0), {"failed": "x"}, measured(1.0, 1.0)]
    theirs = [measured(2.0, 4.0, 8.0), measured(1.0), measured(2.5, 3.0)]
    assert time_ratio(theirs, mine, by_round=True) == Summary(2.0, 2.0, 3.0)  # of 2, 2, 2, 2.5 and 3
    assert time_ratio([measured(1.0)], [{"failed": "x"}], by_round=True) is None


def test_failed_repetitions_are_left_out_with_their_counterpart() -> None:
    found = time_ratio([measured(100.0), measured(2.0)], [{"failed": "x"}, measured(1.0)])
    assert found == Summary(2.0, 2.0, 2.0)
    assert time_ratio([measured(1.0)], [{"failed": "x"}]) is None


def test_the_table_of_speeds_has_ratio_start_up_and_memory() -> None:
    slow, fast = contender("slow", measured(4.0), measured(5.0)), contender("fast", measured(2.0), measured(2.0))
    table, targets = tables(record("cnn", slow, fast, aims=[{"of": "fast", "to": "slow", "at_least": 2.5}]))
    assert table.rows[1] == ("the fast", "500", "2.25 (2.00–2.50)", "8.0", "100")
    assert targets.rows == [("the fast / the slow", "2.25 (2.00–2.50)", "≥ 2.50", "**no**")]


def test_a_reached_target_is_marked_and_one_without_its_contender_is_left_out() -> None:
    two = contender("slow", measured(4.0)), contender("fast", measured(1.0))
    aims = [{"of": "fast", "to": "slow", "at_least": 4.0}, {"of": "fast", "to": "absent", "at_least": 1.0}]
    assert [row[-1] for row in tables(record("cnn", *two, aims=aims))[1].rows] == ["yes"]


def test_a_failed_contender_is_listed_with_its_reason() -> None:
    table = tables(record("cnn", contender("loop", measured(1.0)), contender("other", {"failed": "no such program"})))[
        0
    ]
    assert table.rows[1][:2] == ("the other", "failed: no such program")


def test_methods_are_compared_by_time_and_cpu_time_of_a_round() -> None:
    base = contender("fedavg", measured(2.0, cpu_seconds=[4.0]), measured(4.0, cpu_seconds=[4.0]))
    more = contender("fedfa", measured(2.2, cpu_seconds=[5.0]), measured(4.4, cpu_seconds=[5.0]))
    (table,) = tables(record("methods", base, more))
    assert table.rows[1] == ("the fedfa", "3.30", "1.10 (1.10–1.10)", "1.25 (1.25–1.25)")


def test_interleaved_methods_are_compared_by_round() -> None:
    base = contender("fedavg", measured(1.0, 2.0, 4.0, cpu_seconds=[2.0, 4.0, 8.0]))
    more = contender("fedfa", measured(1.5, 2.0, 4.0, cpu_seconds=[2.0, 4.0, 9.0]))
    (table,) = tables({**record("methods", base, more), "by_round": True})
    assert table.rows[1] == ("the fedfa", "2.00", "1.00 (1.00–1.50)", "1.00 (1.00–1.12)")


def scaled(clients: int, seconds: float, memory: float) -> dict[str, Any]:
    one = measured(seconds, clients=clients, cohort=50, setup=3.0, resident_mb=memory, data_mb=1.0)
    return contender(f"{clients}", one)


def test_scaling_is_relative_to_the_smallest() -> None:
    (table,) = tables(record("clients", scaled(100, 0.5, 200.0), scaled(1000, 0.6, 300.0)))
    assert table.rows[1] == ("the 1000", "600 (600–600)", "1.20 (1.20–1.20)", "12.00", "300", "1.50", "2.4")


def test_interleaved_scaling_is_compared_by_slot() -> None:
    """The machine slows down tenfold; the larger one takes 1.1 times as long all the same."""
    few, many = scaled(100, 1.0, 200.0), scaled(1000, 1.0, 200.0)
    few["measurements"][0]["seconds"], many["measurements"][0]["seconds"] = [1.0, 4.0, 10.0], [1.1, 4.4, 11.0]
    (table,) = tables({**record("clients", few, many), "by_round": True})
    assert table.rows[1][2] == "1.10 (1.10–1.10)"


def step(**shares: float) -> dict[str, Any]:
    found = {
        "shares": shares, "step_seconds": 0.02, "flop_per_step": 8e8, "flop_per_second": 4e10, "matmul_peak": 1e11,
        "share_of_peak": 0.4,
    }  # fmt: skip
    return record("step", contender("fedfa", found))


def test_shares_of_a_step_are_sorted_without_negligible_ones() -> None:
    shares, peak = tables(step(small=0.3, large=0.69, negligible=0.001))
    assert [row[0] for row in shares.rows] == ["large", "small"]
    assert peak.rows[-1] == ("share of that", "40 % (40–40)")


def event(name: str, parent: Any = None) -> Any:
    return SimpleNamespace(name=name, cpu_parent=parent)


def test_an_operation_belongs_to_its_hook_else_to_its_layer() -> None:
    layer = event("aten::linear")
    assert group_of(event("aten::addmm", layer)) == "fully connected layers"
    assert group_of(event("aten::addmm", event("aten::linear", event(f"{HOOK}anchors: loss")))) == "anchors: loss"
    assert group_of(event("aten::something")) == "other operations"


def test_records_are_read_as_written(tmp_path: Path) -> None:
    one = record("cnn", contender("loop", measured(1.0)))
    write_record(tmp_path / "new", one)
    assert read_records(tmp_path / "new") == {"cnn": one}


def test_directories_without_records_or_with_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no benchmark records"):
        read_records(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps([1]))
    with pytest.raises(RunError, match=r"other\.json is not a benchmark record"):
        read_records(tmp_path)


def test_refreshing_a_page_replaces_only_tables_between_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = "a\n<!-- bench {0}: begin -->\nold {0}\n<!-- bench {0}: end -->\nb\n"
    page.write_text(marks.format("cnn") + marks.format("mlp") + marks.format("machine"))
    text = refresh_page(page, {"cnn": record("cnn", contender("loop", measured(2.0)))})
    assert "| the loop | 500 | 1.00 (1.00–1.00) | 8.0 | 100 |" in text
    assert "old cnn" not in text
    assert "old mlp" in text  # not measured: unchanged
    assert "- cnn: a processor, 2 cores" in text
    assert "commit 0123456 with changes" in text
    page.write_text(text)
    assert refresh_page(page, {"cnn": record("cnn", contender("loop", measured(2.0)))}) == text


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(RunError, match="has no marks"):
        refresh_page(tmp_path / "page.md", {})


def test_missing_page_or_matplotlib_is_an_error_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_sections: list[Any] = []
    monkeypatch.setattr("benchmarks.bench.__main__._measure", lambda *arguments: measured_sections.append(arguments))
    with pytest.raises(RunError, match=r"none\.md cannot be read"):
        bench(out=tmp_path, page=tmp_path / "none.md")
    monkeypatch.setattr("benchmarks.bench.performance_plot.find_spec", lambda _: None)
    with pytest.raises(FedfaError, match="need matplotlib"):
        bench(out=tmp_path)
    assert not measured_sections


def test_the_figure_shows_every_contender_and_depends_on_the_records_only(tmp_path: Path) -> None:
    records = {
        "cnn": record("cnn", contender("loop", measured(4.0)), contender("fedfa run", measured(1.6))),
        "clients": record("clients", scaled(100, 0.5, 200.0), scaled(1000, 0.6, 300.0)),
        "step": step(large=0.7, small=0.3),
    }
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    draw(records, first)
    draw(records, second)
    drawn = first.read_text()
    assert "the fedfa run" in drawn
    assert ">2.50<" in drawn
    assert "Section clients" in drawn
    assert second.read_text() == drawn


def test_methods_interleaved_in_one_process_are_compared_by_slot() -> None:
    """The machine slows down fourfold over the slots; b takes 1.1, 1.2 and 1.2 times as long as a all the same."""
    one = {"cpu_seconds": {"a": [1.0, 2.0, 4.0], "b": [1.1, 2.4, 4.8]}}
    (table,) = tables(record("interleaving", contender("all", one)))
    assert table.rows[0] == ("a", "2,000", "1.000 (1.000–1.000)", "1.00–1.00")
    assert table.rows[1] == ("b", "2,400", "1.200 (1.100–1.200)", "1.10–1.20")


def test_the_confidence_interval_of_a_median_shrinks_with_the_number_of_values() -> None:
    """Of 25 values 12.5 ± 4.9 are below the median: from the 7th to the 19th; of three the whole range."""
    assert median_interval([float(n) for n in range(1, 26)]) == (7.0, 19.0)
    assert median_interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
    assert median_interval([5.0]) == (5.0, 5.0)


def test_the_examples_of_medians_are_right() -> None:
    assert doctest.testmod(medians).attempted > 2
    assert doctest.testmod(medians).failed == 0


def test_the_performance_page_shows_the_records_of_every_section() -> None:
    found = read_records(ROOT / "results" / "bench")
    records = {section.name: found[section.name] for section in SECTIONS}
    page = ROOT / "docs" / "performance.md"
    assert refresh_page(page, records) == page.read_text(encoding="utf-8")
    assert all(f"<!-- bench {name}: begin -->" in page.read_text(encoding="utf-8") for name in records)
