"""Exports to TensorBoard and MLflow: the recorded numbers, unchanged and without duplicates."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedfa.cli import main
from fedfa.errors import FedfaError
from fedfa.experiment.recorded_runs import find_runs
from fedfa.report.exports import EXPERIMENT, export_mlflow, export_tensorboard, run_names, scalars


def test_scalars_cover_every_round_and_the_diagnostics(folders: Path) -> None:
    (run,) = find_runs([folders / "fedfa-s1"]).runs
    values = {(one.name, one.round): one.value for one in scalars(run)}
    for line in (folders / "fedfa-s1" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert values["accuracy", record["round"]] == record["accuracy"]
        assert values["class_accuracy/2", record["round"]] == record["class_accuracy"][2]
    measured = json.loads((folders / "fedfa-s1" / "diagnostics.jsonl").read_text().splitlines()[-1])
    assert values["diagnostics/feature_distance/mean", measured["round"]] == measured["feature_distance"]["mean"]
    norms = measured["drift"]["norm"]
    assert values["diagnostics/drift/norm", measured["round"]] == pytest.approx(sum(norms) / len(norms))
    assert ("diagnostics/clients", measured["round"]) not in values, "indices of clients are no measurement"


def test_final_pass_values_have_their_own_names(folders: Path) -> None:
    (run,) = find_runs([folders / "fedavg-ccvr-s1"]).runs
    named = {(one.name, one.round) for one in scalars(run)}
    assert ("final_pass/accuracy", 5) in named
    assert ("accuracy", 5) not in named


def test_run_names_are_relative_to_the_common_directory(folders: Path) -> None:
    runs = find_runs([folders]).runs
    assert sorted(run_names(runs)) == ["fedavg-ccvr-s1", "fedavg-s1", "fedfa-s1", "fedfa-s2"]
    assert list(run_names(runs[:1])) == [runs[0].path.name]


def test_tensorboard_export_is_readable_and_a_second_one_replaces_it(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra `tensorboard`)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = find_runs([folders]).runs
    export_tensorboard(runs, tmp_path)
    other = tmp_path / "fedfa-s1" / "events.out.tfevents.1.somebody"
    other.write_bytes(b"")
    export_tensorboard(runs, tmp_path)
    assert other.exists(), "files of other programs stay"
    assert len(list((tmp_path / "fedfa-s1").glob("*.fedfa"))) == 1
    other.unlink()
    events = EventAccumulator(str(tmp_path / "fedfa-s1"))
    events.Reload()
    read = {event.step: event.value for event in events.Scalars("accuracy")}
    (run,) = find_runs([folders / "fedfa-s1"]).runs
    assert read == pytest.approx({record["round"]: record["accuracy"] for record in run.evaluated})


def test_mlflow_export_holds_config_and_numbers_once(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed (extra `mlflow`)")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # newer versions advise against directories, but still read them
    address = (tmp_path / "store").as_uri()
    runs = find_runs([folders]).runs
    assert export_mlflow(runs, address) == export_mlflow(runs, address) == 4
    client = MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    logged = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert sorted(logged) == ["fedavg-ccvr-s1", "fedavg-s1", "fedfa-s1", "fedfa-s2"]
    one = logged["fedfa-s2"]
    assert (one.data.params["seed"], one.data.params["algorithm.name"]) == ("2", "fedfa")
    history = client.get_metric_history(one.info.run_id, "accuracy")
    (run,) = find_runs([folders / "fedfa-s2"]).runs
    assert {point.step: point.value for point in history} == {r["round"]: r["accuracy"] for r in run.evaluated}


@pytest.mark.parametrize(
    ("module", "words"), [("mlflow", "fedfa\\[mlflow\\]"), ("tensorboard", "fedfa\\[tensorboard\\]")]
)
def test_export_names_the_missing_extra(
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
def invoke(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedfa", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_report_command_writes_page_and_figures(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "there" / "page.html"
    assert invoke(monkeypatch, "report", str(folders / "fedavg-ccvr-s1"), "--out", str(out), "--target", "55") == 0
    text = out.read_text()
    assert f"fedfa report {folders / 'fedavg-ccvr-s1'}" in text
    assert "55 %" in text
    assert (tmp_path / "there" / "page-figures" / "accuracy.png").exists()
    assert "1 run" in capsys.readouterr().out


def test_report_command_names_a_missing_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(monkeypatch, "report", str(tmp_path / "nowhere")) == 1
    error = capsys.readouterr().err
    assert "no such directory" in error
    assert "Traceback" not in error
