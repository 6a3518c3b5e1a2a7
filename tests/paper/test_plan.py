"""The plan of a study: missing runs, their order and their directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfa.errors import ConfigError
from fedfa.paper.cells import key_of, places
from fedfa.paper.declarations import study
from fedfa.paper.plan import missing
from fedfa.paper.run_index import RunIndex
from tests.paper.small_study import place, pretend_run, small_study

COMMITTED = Path(__file__).parents[2] / "results"


def names(study_name: str, *patterns: str, seeds: tuple[int, ...] = (1,)) -> list[str]:
    runs = RunIndex.below([COMMITTED])
    cells = missing(study(study_name), runs, Path("out"), patterns=patterns, seeds=seeds, reading="authors")
    return [cell.name for cell in cells]


def test_committed_runs_are_found_by_their_settings_and_not_planned_again() -> None:
    fmnist = names("label-skew", "fmnist")
    assert "fmnist/c2/fedfa seed 1" not in fmnist
    assert "fmnist/c2/fedavg seed 1" not in fmnist
    found = RunIndex.below([COMMITTED]).finished(place(study("label-skew"), "fmnist/c2", "fedfa"), 200)
    assert (found[0].seed, round(found[0].accuracy(), 2)) == (1, 83.31)


def test_runs_of_fewer_rounds_fill_other_cells() -> None:
    runs = RunIndex.below([COMMITTED])
    here = place(study("label-skew"), "fmnist/dir0.5", "fedfa")
    assert [run.seed for run in runs.finished(here, 50)] == [1, 2]
    assert 50 in runs.lengths(here)
    cells = missing(
        study("label-skew"), runs, Path("out"), patterns=["fmnist/dir0.5/fedfa"], rounds=50, reading="authors"
    )
    assert [cell.config.seed for cell in cells] == [3]
    assert cells[0].directory == Path("out/label-skew/fmnist-dir0.5/fedfa-r50-s3")


def test_plan_starts_with_the_most_informative_cells(tmp_path: Path) -> None:
    """One seed before the next; the first rows in all columns before the others; a source before runs made from it."""
    cells = missing(small_study(), RunIndex.below([]), tmp_path, reading="authors")
    assert [cell.name for cell in cells][:7] == [
        "digits/c2/fedfa seed 1", "digits/iid/fedfa seed 1", "digits/c2/fedavg seed 1",
        "digits/c2/no-calibration seed 1", "digits/c2/ideal seed 1", "digits/c2/fedavg-ccvr seed 1",
        "digits/iid/fedavg seed 1",
    ]  # fmt: skip
    assert [cell.config.seed for cell in cells] == [1] * 7 + [2] * 7


@pytest.mark.parametrize(
    ("patterns", "count"), [(["digits/c2/*"], 5), (["digits/c2"], 5), (["*/fedfa"], 2), (["digits"], 7), ([], 7)]
)
def test_patterns_select_cells(patterns: list[str], count: int, tmp_path: Path) -> None:
    cells = missing(small_study(), RunIndex.below([]), tmp_path, patterns=patterns, seeds=[1], reading="authors")
    assert len(cells) == count


def test_patterns_without_a_cell_and_too_many_rounds_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mnist/\*' matches no cell of small; its cells are digits/c2/fedavg"):
        missing(small_study(), RunIndex.below([]), tmp_path, patterns=["mnist/*"], reading="authors")
    with pytest.raises(ConfigError, match="more than the paper's 4"):
        missing(small_study(), RunIndex.below([]), tmp_path, rounds=5, reading="authors")


def test_unfinished_runs_below_out_continue_in_their_directory(tmp_path: Path) -> None:
    here = place(small_study(), "digits/c2", "fedfa")
    unfinished = pretend_run(tmp_path / "another" / "name", here.config(4, 1), None)
    cells = missing(
        small_study(), RunIndex.below([tmp_path]), tmp_path, patterns=["digits/c2/fedfa"], reading="authors"
    )
    assert [cell.directory for cell in cells] == [unfinished, tmp_path / "small" / "digits-c2" / "fedfa-s2"]


def test_the_same_run_in_two_columns_is_planned_once() -> None:
    cells = names("lambda-and-initialisation", seeds=(99,))  # of which nothing is committed
    assert len(cells) == 7
    assert "fmnist/lambda/lambda-0.5 seed 99" in cells
    assert "fmnist/initial/orthogonal seed 99" not in cells


def test_cell_that_needs_another_runs_server_state_plans_that_run_too(tmp_path: Path) -> None:
    """The record of the other run is there, but not the state it ended with: it must be run again."""
    study = small_study()
    pretend_run(tmp_path / "old", place(study, "digits/c2", "fedfa").config(4, 1), 0.5)
    runs = RunIndex.below([tmp_path])
    cells = missing(study, runs, tmp_path, patterns=["digits/c2/ideal"], seeds=[1], reading="authors")
    assert [cell.name for cell in cells] == ["digits/c2/fedfa seed 1", "digits/c2/ideal seed 1"]
    assert cells[1].config.algorithm.options["anchors"]["init"] == str(cells[0].directory / "server.safetensors")
    assert not cells[1].ready()
    (tmp_path / "old" / "server.safetensors").touch()
    cells = missing(
        study, RunIndex.below([tmp_path]), tmp_path, patterns=["digits/c2/ideal"], seeds=[1], reading="authors"
    )
    assert [cell.name for cell in cells] == ["digits/c2/ideal seed 1"]
    assert cells[0].ready()


def test_path_of_a_server_state_is_not_part_of_the_key(tmp_path: Path) -> None:
    ideal = place(small_study(), "digits/c2", "ideal")
    assert key_of(ideal.config(4, 1, {"fedfa": tmp_path / "a" / "server.safetensors"})) == ideal.key


def test_unreadable_runs_are_reported_and_skipped(tmp_path: Path) -> None:
    here = place(small_study(), "digits/c2", "fedfa")
    pretend_run(tmp_path / "good", here.config(4, 1), 0.5)
    damaged = {"cut": "{", "empty": "{}", "list": "[]", "number": "7"}
    for name, text in damaged.items():
        pretend_run(tmp_path / name, here.config(4, 2), 0.5)
        (tmp_path / name / "summary.json").write_text(text, encoding="utf-8")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.toml").write_text("rounds =", encoding="utf-8")
    runs = RunIndex.below([tmp_path, tmp_path / "nowhere"])
    assert [run.seed for run in runs.finished(here, 4)] == [1]
    assert set(runs.unreadable) == {tmp_path / "bad", *(tmp_path / name for name in damaged)}
    assert (
        "final_accuracy is missing); put back a copy, or delete it and resume the run"
        in runs.unreadable[tmp_path / "empty"]
    )


def test_study_with_diagnostics_needs_runs_with_exactly_these_diagnostics(tmp_path: Path) -> None:
    declared = study("features-and-classifiers")
    here = place(declared, "fmnist/c2", "fedfa")
    measured = here.config(15, 1)
    changes: list[dict[str, Any]] = [{"every": 0}, {"every": 5}, {"samples": 50}, {"clients": 5}, {"features": ()}]
    for number, change in enumerate(changes):
        looked = measured.diagnostics.model_copy(update=change)
        pretend_run(tmp_path / f"other{number}", measured.model_copy(update={"diagnostics": looked}), 0.5)
    assert RunIndex.below([tmp_path]).finished(here, 15) == []
    pretend_run(tmp_path / "measured", measured, 0.5)
    assert [run.path.name for run in RunIndex.below([tmp_path]).finished(here, 15)] == ["measured"]


def test_readings_with_equal_configs_give_one_place() -> None:
    """A baseline has the same settings in the paper's text and by default; FedFA has three forms."""
    found: dict[str, list[str]] = {}
    for one in places(study("label-skew")):
        if one.column.name == "fmnist/c2":
            found.setdefault(one.row.name, []).append(one.reading)
    assert found["fedfa"] == ["authors", "paper", "default"]
    assert found["fedprox"] == ["authors", "paper"]
