"""Other programs' dashboards: the numbers of a run folder, unchanged, and again without doubles."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedfa.cli import main
from fedfa.errors import FedfaError
from fedfa.report.html.reading import find_runs
from fedfa.report.mlflow import EXPERIMENT, export_mlflow
from fedfa.report.names import run_names
from fedfa.report.scalars import scalars
from fedfa.report.tensorboard import export_tensorboard


def test_every_round_and_measurement_becomes_a_value(folders: Path) -> None:
    (run,) = find_runs([folders / "fedfa-s1"]).runs
    values = {(one.name, one.round): one.value for one in scalars(run)}
    for line in (folders / "fedfa-s1" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert values["accuracy", record["round"]] == record["accuracy"]
        assert values["class_accuracy/2", record["round"]] == record["class_accuracy"][2]
    seen = json.loads((folders / "fedfa-s1" / "insight.jsonl").read_text().splitlines()[-1])
    assert values["insight/feature_distance/mean", seen["round"]] == seen["feature_distance"]["mean"]
    norms = seen["drift"]["norm"]
    assert values["insight/drift/norm", seen["round"]] == pytest.approx(sum(norms) / len(norms))
    assert ("insight/clients", seen["round"]) not in values, "numbers of clients are no measurement"


def test_a_survey_has_names_of_its_own(folders: Path) -> None:
    (run,) = find_runs([folders / "fedavg-ccvr-s1"]).runs
    named = {(one.name, one.round) for one in scalars(run)}
    assert ("survey/accuracy", 5) in named
    assert ("accuracy", 5) not in named


def test_names_tell_runs_of_several_places_apart(folders: Path) -> None:
    runs = find_runs([folders]).runs
    assert sorted(run_names(runs)) == ["fedavg-ccvr-s1", "fedavg-s1", "fedfa-s1", "fedfa-s2"]
    assert list(run_names(runs[:1])) == [runs[0].folder.name]


def test_tensorboard_reads_the_numbers_and_a_second_export_replaces_the_first(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra `tensorboard`)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = find_runs([folders]).runs
    export_tensorboard(runs, tmp_path)
    other = tmp_path / "fedfa-s1" / "events.out.tfevents.1.somebody"
    other.write_bytes(b"")
    export_tensorboard(runs, tmp_path)
    assert other.exists(), "other programs' files stay"
    assert len(list((tmp_path / "fedfa-s1").glob("*.fedfa"))) == 1
    other.unlink()
    events = EventAccumulator(str(tmp_path / "fedfa-s1"))
    events.Reload()
    read = {event.step: event.value for event in events.Scalars("accuracy")}
    (run,) = find_runs([folders / "fedfa-s1"]).runs
    assert read == pytest.approx({record["round"]: record["accuracy"] for record in run.evaluated})


def test_mlflow_holds_settings_and_numbers_once(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed (extra `mlflow`)")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions advise against folders, and still read them
    address = (tmp_path / "store").as_uri()
    runs = find_runs([folders]).runs
    assert export_mlflow(runs, address) == export_mlflow(runs, address) == 4
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    logged = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert sorted(logged) == ["fedavg-ccvr-s1", "fedavg-s1", "fedfa-s1", "fedfa-s2"]
    one = logged["fedfa-s2"]
    assert (one.data.params["seed"], one.data.params["algorithm.recipe"]) == ("2", "fedfa")
    history = client.get_metric_history(one.info.run_id, "accuracy")
    (run,) = find_runs([folders / "fedfa-s2"]).runs
    assert {point.step: point.value for point in history} == {r["round"]: r["accuracy"] for r in run.evaluated}


@pytest.mark.parametrize(
    ("module", "words"), [("mlflow", "fedfa\\[mlflow\\]"), ("tensorboard", "fedfa\\[tensorboard\\]")]
)
def test_what_is_not_installed_is_named(
    module: str, words: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("mlflow", "torch.utils.tensorboard", "tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    runs = find_runs([folders / "fedavg-s1"]).runs
    export = {
        "mlflow": lambda: export_mlflow(runs, str(tmp_path)),
        "tensorboard": lambda: export_tensorboard(runs, tmp_path),
    }
    with pytest.raises(FedfaError, match=words):
        export[module]()


# -- the command ------------------------------------------------------------------------------------------------------
def ask(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedfa", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_command_writes_page_and_figures_beside_the_runs(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "there" / "page.html"
    assert ask(monkeypatch, "report", str(folders / "fedavg-ccvr-s1"), "--out", str(out), "--target", "55") == 0
    text = out.read_text()
    assert f"fedfa report {folders / 'fedavg-ccvr-s1'}" in text
    assert "55 %" in text
    assert (tmp_path / "there" / "page-figures" / "accuracy.png").exists()
    assert "1 run" in capsys.readouterr().out


def test_the_command_says_in_a_line_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(monkeypatch, "report", str(tmp_path / "nowhere")) == 1
    error = capsys.readouterr().err
    assert "there is no folder" in error
    assert "Traceback" not in error
