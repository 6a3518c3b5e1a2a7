"""The sentence, the differences, the overview, the losses and the split of data given in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfa.data import DataSet
from fedfa.experiment.recorded_runs import RecordedRun, find_runs
from fedfa.report.html.data_split import Split, Splits
from fedfa.report.html.figures import accuracy_figures, loss_figures
from fedfa.report.html.grouping import chapters_of
from fedfa.report.html.headline import differences, headline, overview
from fedfa.report.html.palette import styles


def recorded(name: str, seed: int, curve: list[float], group: str = "runs", **record: Any) -> RecordedRun:
    """A finished run with these accuracies."""
    metrics = tuple(
        {"round": place + 1, "accuracy": value, "loss": 1.0, "train_loss": 1.0} | record
        for place, value in enumerate(curve)
    )
    last = curve[-10:]
    summary = {"final_accuracy": curve[-1], "best_accuracy": max(curve), "last10_accuracy": sum(last) / len(last)}
    config = {"seed": seed, "rounds": len(curve), "data": {"name": group}, "algorithm": {"name": name}}
    return RecordedRun(Path(f"{group}/{name}-s{seed}"), config, metrics, summary, group)


def test_headline_names_the_best_its_lead_and_whether_it_is_noise() -> None:
    sure = [recorded("fedavg", s, [0.5 + s / 1000] * 10) for s in (1, 2, 3)]
    sure += [recorded("fedfa", s, [0.6 + s / 1000 + (s == 2) / 5000] * 10) for s in (1, 2, 3)]
    (chapter,) = chapters_of(sure)
    assert headline(chapter) == (
        "fedfa is best with 60.21 % (mean of the last ten evaluations), 10.01 points ahead of fedavg, more than the "
        "noise between seeds."
    )
    unsure = [recorded("fedavg", s, [0.5]) for s in (1, 2, 3)]
    unsure += [recorded("fedfa", s, [0.45 + s / 30]) for s in (1, 2, 3)]
    assert "which seed noise could explain" in headline(chapters_of(unsure)[0])
    assert "too few seeds" in headline(chapters_of([sure[0], sure[3]])[0])
    assert headline(chapters_of([recorded("fedavg", 1, [0.5])])[0]) == ("fedavg reaches 50.00 % (a single evaluation).")
    assert "both reach 50.00 %" in headline(chapters_of([recorded("a", 1, [0.5]), recorded("b", 1, [0.5])])[0])


def test_headline_says_what_it_is_the_mean_of() -> None:
    eight, twelve = [0.1] * 4 + [0.9] * 4, [0.0, 0.0] + [0.5] * 10
    assert headline(chapters_of([recorded("a", 1, eight)])[0]) == "a reaches 50.00 % (mean of all 8 evaluations)."
    assert "(mean of the last ten evaluations)" in headline(chapters_of([recorded("a", 1, twelve)])[0])
    mixed = headline(chapters_of([recorded("a", 1, eight), recorded("b", 1, twelve)])[0])
    assert "(mean of all evaluations, ten at most)" in mixed


def test_differences_are_those_of_equal_seeds_with_fedavg_as_baseline() -> None:
    runs = [recorded("fedavg", 1, [0.5]), recorded("ccvr", 1, [0.55]), recorded("ccvr", 2, [0.9])]
    text = differences(chapters_of(runs)[0])
    assert "ccvr − fedavg</th><td>1</td><td>+5.00</td>" in text
    assert differences(chapters_of(runs[:1])[0]) == ""


def test_overview_has_a_column_for_each_setting() -> None:
    runs = [
        recorded("fedavg", 1, [0.5], "one"),
        recorded("fedavg", 1, [0.7], "two"),
        recorded("fedfa", 1, [0.6], "two"),
    ]
    text = overview(chapters_of(runs))
    assert text.count('href="#c') == 2
    assert '<th scope="row">fedfa</th><td>–</td><td>60.00 [1]</td>' in text
    assert '<td class="most">70.00 [1]</td>' in text
    assert overview(chapters_of(runs[:1])) == ""


@pytest.mark.parametrize(
    ("directory", "variant", "expected"),
    [("fedfa-plus-s1", "plus", "fedfa@plus"), ("fedfa-s1", "default", "fedfa"), ("mine-s1", "plus", "mine")],
)
def test_methods_have_the_name_they_were_asked_for(directory: str, variant: str, expected: str) -> None:
    run = RecordedRun(Path(directory), {"seed": 1, "algorithm": {"name": "fedfa", "variant": variant}})
    assert run.label == expected
    both = RecordedRun(Path("fedavg-ccvr-s1"), {"seed": 1, "algorithm": {"name": "fedavg+ccvr"}})
    assert both.label == "fedavg+ccvr"


def test_a_divergence_is_visible_in_the_loss_and_cut_in_the_drawing() -> None:
    calm = recorded("fedavg", 1, [0.5] * 3)
    wild = recorded("scaffold", 1, [0.5] * 3)
    rounds = tuple({**r, "loss": 10.0 ** (3 * i)} for i, r in enumerate(wild.metrics))
    (chapter,) = chapters_of([calm, RecordedRun(wild.path, wild.config, rounds, wild.summary, wild.group)])
    test, train = loss_figures(chapter, styles(["fedavg", "scaffold"]))
    assert "Cut at 4.00, 4 times the first value: scaffold went beyond." in test.caption
    assert "Cut" not in train.caption
    assert test.hover[0]["s"][1]["p"][-1][1] == 1e6
    assert test.table is not None
    assert test.table.rows[-1] == ["3", "1.00", "1,000,000"]


def test_close_lines_get_a_chart_of_the_second_half() -> None:
    up = [0.1, 0.5, 0.7, 0.78, 0.8, 0.81, 0.815, 0.82, 0.82, 0.825]
    runs = [recorded("fedavg", 1, up), recorded("fedfa", 1, [value + 0.01 for value in up])]
    (chapter,) = chapters_of(runs)
    whole, late = accuracy_figures(chapter, styles(["fedavg", "fedfa"]))
    assert (whole.name, late.name, late.title) == ("accuracy", "accuracy-late", "From round 5 on")
    low, high = late.wide.plots[0]["y"]
    assert 70 < low < high < 90
    far = [recorded("fedavg", 1, up), recorded("fedfa", 1, [value / 3 for value in up])]
    assert len(accuracy_figures(chapters_of(far)[0], styles(["fedavg", "fedfa"]))) == 1


def test_split_of_data_given_in_python_is_recorded(folders: Path, blobs: DataSet) -> None:
    (run,) = find_runs([folders / "fedfa-s1"]).runs
    split = Splits().of(run)
    assert isinstance(split, Split)
    federation = blobs.split("shards:2", 6, run.config["data"]["seed"])
    assert [list(row) for row in split.counts] == [federation.client(n).label_counts.tolist() for n in range(6)]
    assert split.numbers == federation.summary()
