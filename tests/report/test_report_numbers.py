"""The report without a browser: finding and grouping runs, numbers behind figures, layout, colours."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfa.errors import RunError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.files import digest_of
from fedfa.experiment.layers import merge, parse_assignment
from fedfa.experiment.record import accuracies
from fedfa.experiment.recorded_runs import RecordedRun, find_runs
from fedfa.experiment.run import same_run
from fedfa.report.html.chart import SMALL, ticks
from fedfa.report.html.commands import command_of
from fedfa.report.html.data_split import Split, Splits
from fedfa.report.html.drawing import Dots, Drawing, Text, text_width
from fedfa.report.html.figures import accuracy_series, progress, reach, series_table, targets_of
from fedfa.report.html.grouping import MethodRuns, chapters_of
from fedfa.report.html.heat_maps import ColourScale, Heat, heat_maps
from fedfa.report.html.line_charts import Axis, Panel, Series, line_chart, multiples, spread
from fedfa.report.html.palette import DARK, LIGHT, SERIES, style, styles
from fedfa.report.html.scatter_plots import ScatterPanel, scatter_plots
from fedfa.report.html.write import Reporter


def made(name: str, accuracies: list[float | None], seed: int = 1, **more: Any) -> RecordedRun:
    """A run with these accuracies, ten seconds and three megabytes a round."""
    metrics = tuple(
        {"round": n, "accuracy": a, "train_seconds": 10.0, "bytes_up": 1_000_000, "bytes_down": 2_000_000}
        for n, a in enumerate(accuracies, start=1)
    )
    config = {"rounds": len(accuracies), "seed": seed, "data": {"name": "blobs"}, "model": {"name": "mlp"}}
    return RecordedRun(Path(name), config, metrics, group="runs", **more)


# -- finding ----------------------------------------------------------------------------------------------------------
def test_find_runs_searches_at_any_depth_and_returns_each_run_once(folders: Path) -> None:
    found = find_runs([folders.parent, folders, folders / "fedfa-s1"])
    assert sorted(run.path.name for run in found.runs) == ["fedavg-ccvr-s1", "fedavg-s1", "fedfa-s1", "fedfa-s2"]
    assert not found.problems


def test_find_runs_names_unreadable_runs_and_returns_the_others(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders, tmp_path / "runs")
    (tmp_path / "runs" / "fedfa-s1" / "config.toml").write_text("rounds = [")
    (tmp_path / "runs" / "fedfa-s2" / "config.toml").unlink()
    lines = (tmp_path / "runs" / "fedavg-s1" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs" / "fedavg-s1" / "metrics.jsonl").write_text("".join([lines[0], "{broken\n", *lines[1:]]))
    found = find_runs([tmp_path])
    assert [run.path.name for run in found.runs] == ["fedavg-ccvr-s1"]
    words = {problem.path.name: problem.message for problem in found.problems}
    assert set(words) == {"fedfa-s1", "fedfa-s2", "fedavg-s1"}
    assert "config.toml cannot be read" in words["fedfa-s1"]
    assert "no config.toml" in words["fedfa-s2"]
    assert "metrics.jsonl is damaged" in words["fedavg-s1"]


def test_find_runs_skips_an_incomplete_last_line(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "fedavg-s1", tmp_path / "fedavg-s1")
    (tmp_path / "fedavg-s1" / "summary.json").unlink()
    with (tmp_path / "fedavg-s1" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "accur')
    (run,) = find_runs([tmp_path]).runs
    assert (run.done, run.finished) == (4, False)


def test_damaged_summary_or_diagnostics_leave_the_curves(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "fedavg-s1", tmp_path / "fedavg-s1")
    (tmp_path / "fedavg-s1" / "summary.json").write_text("{}")
    (tmp_path / "fedavg-s1" / "diagnostics.jsonl").write_text("nonsense\n")
    (run,) = find_runs([tmp_path]).runs
    assert len(run.evaluated) == 4
    assert not run.finished
    problems = Reporter([tmp_path], tmp_path / "page.html", figures=False).write().problems
    assert {problem.message.partition(" ")[0] for problem in problems} == {"summary.json", "diagnostics.jsonl"}


def test_report_of_a_missing_path_fails_unless_watching(tmp_path: Path) -> None:
    reporter = Reporter([tmp_path / "nowhere"], tmp_path / "page.html")
    with pytest.raises(RunError, match=r"nowhere: no such directory"):
        reporter.write()
    assert reporter.watch(1, lambda _: None, limit=0).problems


# -- grouping ---------------------------------------------------------------------------------------------------------
def rewrite(config: Path, old: str, new: str) -> None:
    """Change a recorded config, and its digest with it."""
    text = config.read_text().partition("\n")[2].replace(old, new, 1)
    config.write_text(f"# digest of what follows: {digest_of(text)}\n{text}")


def test_runs_of_equal_configs_are_seeds_of_one_method(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders, tmp_path / "runs")
    config = tmp_path / "runs" / "fedfa-s2" / "config.toml"
    (chapter,) = chapters_of(find_runs([tmp_path / "runs"]).runs)
    assert {m.name: [r.seed for r in m.runs] for m in chapter.methods} == {
        "fedavg": [1], "fedavg+ccvr": [1], "fedfa": [1, 2]
    }  # fmt: skip
    rewrite(config, "lr = 0.1\n", "lr = 0.2\n")
    (chapter,) = chapters_of(find_runs([tmp_path / "runs"]).runs)
    assert len(chapter.methods) == 4, "another learning rate is another method"
    rewrite(config, 'name = "mlp"', 'name = "cnn-fmnist"')
    assert len(chapters_of(find_runs([tmp_path / "runs"]).runs)) == 2, "another network is another chapter"


def test_curve_is_the_mean_over_rounds_that_all_seeds_have() -> None:
    """Seeds 1 and 2 at 0.2 and 0.4 in round 1, only seed 1 has round 2: the mean 0.3 stands alone."""
    method = MethodRuns("m", (made("m-s1", [0.2, 0.9]), made("m-s2", [0.4], seed=2), made("m-s3", [], seed=3)))
    (point,) = method.curve(lambda record: record["accuracy"])
    assert (point.x, point.mean, point.low, point.high) == pytest.approx((1, 0.3, 0.2, 0.4))


def test_final_pass_stands_after_the_accuracy_curve(folders: Path) -> None:
    (chapter,) = chapters_of(find_runs([folders]).runs)
    series = {one.name: one for one in accuracy_series(chapter, styles(m.name for m in chapter.methods))}
    summary = json.loads((folders / "fedavg-ccvr-s1" / "summary.json").read_text())
    assert series["fedavg+ccvr"].after == pytest.approx((5, 100 * summary["final_accuracy"]))
    assert series["fedavg+ccvr"].points[-1] == pytest.approx((4, 100 * summary["accuracy_before_final_pass"]))
    assert series["fedavg"].after is None
    assert series["fedfa"].band is not None
    assert series["fedavg"].band is None


# -- numbers ----------------------------------------------------------------------------------------------------------
def test_results_of_an_unfinished_run_equal_those_of_a_summary(folders: Path) -> None:
    for run in find_runs([folders]).runs:
        going = RecordedRun(run.path, run.config, run.metrics)
        recorded, so_far = run.results, going.results
        assert {key: recorded[key] for key in so_far} == so_far
        assert recorded["best_accuracy"] == max(record["accuracy"] for record in run.metrics if record["accuracy"])
    assert accuracies([]) == {}


def test_costs_of_an_accuracy_count_all_rounds_until_it_is_reached() -> None:
    """0.3, not evaluated, 0.5, 0.4: 40 % is first seen in round 3, after 3 · 10 s and 3 · 3 MB."""
    method = MethodRuns("m", (made("m-s1", [0.3, None, 0.5, 0.4]),))
    found = reach(method, 0.4)
    assert found is not None
    assert (found.rounds, found.seconds, found.megabytes) == pytest.approx((3, 30, 9))
    assert reach(method, 0.6) is None
    assert [entry.best for entry in progress(method.runs[0])] == [0.3, 0.5, 0.5]
    two = MethodRuns("m", (*method.runs, made("m-s2", [0.4, 0.1], seed=2), made("m-s3", [0.1], seed=3)))
    both = reach(two, 0.4)
    assert both is not None
    assert (both.rounds, both.seeds, both.of) == (2, 2, 3)


def test_default_targets_are_round_and_reached() -> None:
    (chapter,) = chapters_of([made("a", [0.11, 0.52, 0.78])])
    assert targets_of(chapter, []) == [50, 60, 70]
    assert targets_of(chapter, [75, 33]) == [33, 75]
    (narrow,) = chapters_of([made("a", [0.71, 0.78])])
    assert targets_of(narrow, []) == [74, 76, 78]


def test_command_of_a_run_gives_its_config(tmp_path: Path) -> None:
    """Parse the command as the command line would, and compare with the configuration."""
    wanted = Config.preset("fmnist-c2", {"rounds": 7, "seed": 3, "local": {"lr": 0.05}, "algorithm": {"name": "moon"}})
    words = shlex.split(command_of(RecordedRun(tmp_path / "moon-s3", wanted.to_dict())))
    assert words[:4] == ["fedfa", "run", "--preset", "fmnist-c2"]
    options = list(zip(words[2::2], words[3::2], strict=True))
    asked: dict[str, Any] = {}
    for key, value in options:
        if key in ("--rounds", "--seed"):
            asked = merge(asked, {key[2:]: int(value)})
        elif key == "--algorithm":
            asked = merge(asked, {"algorithm": {"name": value}})
        elif key == "--set":
            asked = merge(asked, parse_assignment(value))
    assert same_run(Config.preset("fmnist-c2", asked), wanted)
    assert not same_run(Config.preset("fmnist-c2", {"algorithm": {"name": "moon"}}), wanted)


def test_command_of_a_run_far_from_every_preset_reads_its_config_file(folders: Path) -> None:
    assert "config.toml" in command_of(find_runs([folders / "fedfa-s1"]).runs[0])


def test_data_split_is_that_of_the_run_and_rejected_for_other_data(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    settings = Config.preset("digits-c2", {"data": {"offline": True}})
    run = RecordedRun(Path("x"), settings.to_dict())
    split = Splits().of(run)
    assert isinstance(split, Split)
    trained_on = Experiment.from_config(settings).federation
    assert len(split.counts) == split.clients == len(trained_on)
    for client, counts in zip(split.shown, split.counts, strict=True):
        assert list(counts) == trained_on.client(client).label_counts.tolist()
    other = RecordedRun(Path("x"), settings.to_dict(), summary={"data": {"fingerprint": "another"}})
    assert Splits().of(other) == "the data set 'digits' on this machine is not the one of the run"


def test_line_labels_keep_their_distance_and_order() -> None:
    places = spread([50, 50, 51, 90, 99], 15, 0, 100)
    assert all(b - a >= 15 - 1e-9 for a, b in itertools.pairwise(places))
    assert places[0] >= 0
    assert places[-1] <= 100
    assert spread([20, 60], 15, 0, 100) == [20, 60], "those with enough space stay where they are"


def test_axis_ticks_are_round_and_inside() -> None:
    for low, high in ((0, 83.3), (0.02, 0.031), (-1, 1), (3, 1e6)):
        marks = ticks(low, high, 5)
        assert 2 <= len(marks) <= 12
        assert low - 1e-9 <= marks[0] <= marks[-1] <= high * (1 + 1e-9)


def axis_labels(drawing: Drawing) -> list[Text]:
    """Labels of horizontal axes: small and centred."""
    return [m for m in drawing.marks if isinstance(m, Text) and m.size == SMALL and m.anchor == "middle"]


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 7, 10, 15, 17, 26, 100, 200, 1000])
@pytest.mark.parametrize("width", [344, 446, 920])
def test_round_axis_has_integer_ticks(rounds: int, width: float) -> None:
    series = [Series("m", style(0), [(float(n), 1.0) for n in range(1, rounds + 1)])]
    x, y = Axis("round", low=0, whole=True), Axis("accuracy", low=0)
    for drawing in (line_chart(series, x, y, width, 300), multiples([Panel("m", series)] * 3, x, y, width)):
        texts = [word.text for word in axis_labels(drawing)]
        assert texts[0] == "0"
        assert len(texts) >= 2
        assert all(text.replace(",", "").isdigit() for text in texts)


def test_series_table_shows_rounds_as_integers() -> None:
    assert series_table([Series("m", style(0), [(1.0, 1.0), (2.0, 1.0)])], "round").rows[1][0] == "2"
    assert series_table([Series("m", style(0), [(0.5, 1.0), (2.0, 1.0)])], "s").rows[1][0] == "2.00"


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("width", [344, 920])
def test_heat_map_labels_rounds_without_overlap(width: float, every: int) -> None:
    """The labels are in proportion, apart from each other, and none is cut off at the edge."""
    columns = list(range(every, 201, every))
    heat = Heat(["a", "b"], [str(n) for n in columns], [[0.5] * len(columns)] * 2, "m", "class", "round")
    drawing = heat_maps([heat, heat], width, ColourScale(0, 1))
    words = axis_labels(drawing)
    assert all(int(word.text) % 10 == 0 for word in words)
    assert max(word.at[0] + text_width(word.text, SMALL) / 2 for word in words) <= drawing.width
    one = words[: len(words) // 2]
    assert len(one) >= 5
    for a, b in itertools.pairwise(one):
        assert b.at[0] - a.at[0] > (text_width(a.text, SMALL) + text_width(b.text, SMALL)) / 2
    steps = [(b.at[0] - a.at[0]) / (int(b.text) - int(a.text)) for a, b in itertools.pairwise(one[:-1])]
    assert max(steps) == pytest.approx(min(steps))


def test_scatter_plot_distinguishes_the_anchors_of_ten_classes() -> None:
    points = [(float(n), float(n * n)) for n in range(10)]
    drawing = scatter_plots(
        [ScatterPanel("m", [[point] for point in points], points)], [str(n) for n in range(10)], 344
    )
    anchors = [(m.colour, m.shape) for m in drawing.marks if isinstance(m, Dots) and m.rim]
    assert len(anchors) == len(set(anchors)) == 10


def test_small_multiples_with_several_lines_have_a_legend() -> None:
    lines = [Series(name, style(n), [(0.0, 1.0), (1.0, 2.0)]) for n, name in enumerate(("positive", "negative"))]
    x, y = Axis("cosine"), Axis("share")
    words = [m.text for m in multiples([Panel("a", lines), Panel("b", lines)], x, y, 344).marks if isinstance(m, Text)]
    assert words.count("positive") == words.count("negative") == 1
    alone = [Panel(one.name, [one], lines) for one in lines]
    words = [m.text for m in multiples(alone, x, y, 344).marks if isinstance(m, Text)]
    assert words.count("positive") == 1, "a chart of one line has its title"


# -- colours ----------------------------------------------------------------------------------------------------------
#: G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, *A Physiologically-based Model for Simulation of Color Vision
#: Deficiency*, IEEE TVCG 15 (2009): full protanopia, deuteranopia, tritanopia, on linear RGB.
SEEN = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.asarray(np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4))


def cielab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    light = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) + 0.05 for colour in (a, b))
    return light[1] / light[0]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_series_colours_differ_for_every_kind_of_colour_vision(theme: dict[str, str], eyes: str) -> None:
    seen = [cielab(SEEN[eyes] @ linear(theme[f"s{k}"])) for k in range(SERIES)]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) >= 20


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_text_have_enough_contrast(theme: dict[str, str]) -> None:
    """WCAG 2: 3 to 1 for graphics, 4.5 to 1 for text."""
    assert all(contrast(theme[f"s{k}"], theme["surface"]) >= 3 for k in range(SERIES))
    for text in ("ink", "muted", "link"):
        assert min(contrast(theme[text], theme[ground]) for ground in ("surface", "page")) >= 4.5


def test_method_has_the_same_style_on_every_page() -> None:
    assert styles(["fedfa", "moon"])["fedfa"] == styles(["fedfa", "fedavg", "scaffold"])["fedfa"] == style(0)
    assert styles(["fedavg"])["fedavg"] == style(1)
    assert len({(style(k).colour, style(k).dash) for k in range(32)}) == 32
