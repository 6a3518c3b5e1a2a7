"""The results page: up to date with the committed results, and made from them alone."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from fedfa.algorithms.registry import expression_names
from fedfa.errors import RunError
from fedfa.experiment.config import Config, read_toml
from fedfa.report.results_page import read_results, refresh_page, results_table

ROOT = Path(__file__).parents[1]


def test_docs_results_is_up_to_date() -> None:
    page = ROOT / "docs" / "results.md"
    assert refresh_page(page, ROOT / "results") == page.read_text(encoding="utf-8"), (
        "run: fedfa results --page docs/results.md"
    )


def test_committed_results_hold_all_that_is_needed_to_repeat_them() -> None:
    runs = read_results(ROOT / "results")
    assert runs
    for run in runs:
        assert run.summary is not None
        config = Config.resolve(read_toml(run.path / "config.toml"))
        assert config.seed == run.summary["seeds"]["training"]
        assert config.algorithm.name == "+".join(expression_names(run.summary["algorithm"]))
        assert len(run.summary["commit"]) == 40, "a result comes from a clean commit"
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text("utf-8").splitlines()]
        has_final_pass = int(config.build_algorithm().has_final_pass)
        assert [record["round"] for record in records] == list(range(1, config.rounds + has_final_pass + 1))
        if config.data.validation is None:
            assert records[-1]["accuracy"] == run.summary["final_accuracy"]
        else:  # rounds are evaluated on validation samples; the chosen one is tested once
            assert {record["evaluated"]["on"] for record in records} == {"validation"}
            chosen = max(records, key=lambda record: record["accuracy"])
            assert run.summary["chosen"]["round"] == chosen["round"]
            assert run.summary["test"]["accuracy"] == run.summary["final_accuracy"]


def test_results_page_without_marks_is_rejected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here", encoding="utf-8")
    with pytest.raises(RunError, match="marks"):
        refresh_page(page, tmp_path)
    with pytest.raises(RunError, match=r"missing\.md cannot be read .*marks"):
        refresh_page(tmp_path / "missing.md", tmp_path)


def test_results_table_shows_the_papers_number_only_beside_equal_runs(tmp_path: Path) -> None:
    summary = {
        "algorithm": "fedfa", "variant": "authors", "rounds": 200, "seeds": {"training": 1}, "commit": "a" * 40,
        "final_accuracy": 0.5, "best_accuracy": 0.6, "last10_accuracy": 0.55,
    }  # fmt: skip
    runs = {"long": (200, {}), "short": (50, {}), "half": (200, {"calibration": {"when": "never"}})}
    for name, (rounds, changes) in runs.items():
        folder = tmp_path / "fmnist-c2" / name
        folder.mkdir(parents=True)
        algorithm = {"name": "fedfa", "variant": "authors", **changes}
        config = Config.preset("fmnist-c2", {"rounds": rounds, "algorithm": algorithm})
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        (folder / "summary.json").write_text(json.dumps({**summary, "rounds": rounds}), encoding="utf-8")
    numbers = {line.split(" | ")[1]: line.split(" | ")[-2] for line in results_table(tmp_path).splitlines()[2:]}
    assert numbers == {"long": "84.08 (1.22)", "short": "–", "half": "78.07 (2.23)"}


def test_diagnostics_go_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = "<!-- inside features-and-classifiers: {} -->\n"
    page.write_text(
        f"<!-- results: begin -->\n<!-- results: end -->\n{marks.format('begin')}was here\n{marks.format('end')}"
    )
    text = refresh_page(page, ROOT / "results")
    assert "was here" not in text.partition("<!-- inside")[2]
    seen = (ROOT / "results/inside-fmnist-c2/fedfa-authors-s1/insight.jsonl").read_text("utf-8").splitlines()
    first, last = (json.loads(line)["gradient"]["global"] for line in (seen[0], seen[-1]))
    assert f"{first:.2f} → {last:.2f} |\n| accuracy" in text
    page.write_text(text, encoding="utf-8")
    assert refresh_page(page, ROOT / "results") == text, "a second time changes nothing"


def test_results_table_names_a_damaged_summary(tmp_path: Path) -> None:
    (tmp_path / "setting" / "run").mkdir(parents=True)
    (tmp_path / "setting" / "run" / "config.toml").write_text("")
    (tmp_path / "setting" / "run" / "summary.json").write_text("{}")
    with pytest.raises(RunError, match=r"summary\.json is damaged \(final_accuracy is missing\)"):
        results_table(tmp_path)


def test_paper_tables_go_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = "<!-- results: begin -->\n<!-- results: end -->\n"
    marks += "<!-- paper ablation: begin -->\nwas here before\n<!-- paper ablation: end -->\n"
    marks += "<!-- paper ablation last10: begin -->\nand here\n<!-- paper ablation last10: end -->\n"
    page.write_text(marks, encoding="utf-8")
    text = refresh_page(page, ROOT / "results")
    assert "was here before" not in text
    assert "and here" not in text
    final, _, last10 = text.partition("<!-- paper ablation last10: begin -->")
    summaries = [
        json.loads(file.read_text()) for file in (ROOT / "results/fmnist-c2").glob("fedfa-authors-s*/summary.json")
    ]
    for component, key in ((final, "final_accuracy"), (last10, "last10_accuracy")):
        assert f"| FedFA | {100 * fmean(summary[key] for summary in summaries):.2f}" in component
    assert text.count("paper ablation") == 4
    page.write_text(text, encoding="utf-8")
    assert refresh_page(page, ROOT / "results") == text, "a second time changes nothing"
