"""The lemmas: formulas by hand, cases in which they are exact, and both sides on training clients."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedfa.cli import main
from fedfa.data import DataSet
from fedfa.diagnostics.theory import Agreement, Finding, Lemmas, Sides, both_trainings, compare_lemmas, predictions
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from tests.experiment.run_toys import small


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


# -- the formulas -----------------------------------------------------------------------------------------------------
def test_both_lemmas_by_hand_for_an_undecided_classifier() -> None:
    """Weights φ₀ = (1, 0), φ₁ = (1, 0): every p is ½. n = 3, classes 0, 0, 1, features (2, 0), (4, 0), (0, 6); η = 0.6.

    Lemma 1: positive η/n · n_c (1 − ½) h̄_c is 0.2 · 2 · ½ · (3, 0) = (0.6, 0) for class 0 and 0.2 · 1 · ½ · (0, 6) =
    (0, 0.6) for class 1; negative takes the other class's: (0, 0.6) for class 0, (0.6, 0) for class 1.
    Lemma 2: (1 − ½) φ_c − ½ φ_c' is zero, as the proxies are equal.
    """
    features = torch.tensor([[2.0, 0.0], [4.0, 0.0], [0.0, 6.0]])
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    found = predictions(features, torch.tensor([0, 0, 1]), weight, None, lr=0.6)
    assert found["classifier positive"].flatten().tolist() == pytest.approx([0.6, 0, 0, 0.6])
    assert found["classifier negative"].flatten().tolist() == pytest.approx([0, 0.6, 0.6, 0])
    assert found["features lemma"].abs().max() < 1e-12


def test_lemma_two_by_hand() -> None:
    """φ₀ = (ln 3, 0), φ₁ = 0, one sample (1, 0) of class 0: p = ¾, ¼. (1 − ¾) φ₀ − ¼ φ₁ = (¼ ln 3, 0), times η = 2."""
    weight = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
    found = predictions(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), weight, None, lr=2.0)
    assert found["features lemma"].flatten().tolist() == pytest.approx([math.log(3) / 2, 0, 0, 0])


def test_the_exact_step_is_that_of_gradient_descent() -> None:
    features, labels, bias = random(9, 4), torch.arange(9) % 3, random(3, seed=2)
    weight = random(3, 4, seed=1).requires_grad_()
    functional.cross_entropy(features @ weight.mT + bias, labels).backward()
    assert weight.grad is not None
    found = predictions(features, labels, weight, bias, lr=0.3)
    assert torch.allclose(found["classifier gradient"], -0.3 * weight.grad)


def test_lemma_one_is_exact_where_the_features_of_a_class_are_equal() -> None:
    """Then p is equal too, and the mean of products is the product of means."""
    labels = torch.tensor([0, 2, 2, 1, 0, 0])
    found = predictions(random(3, 5)[labels], labels, random(3, 5, seed=1), None, lr=0.1)
    lemma = found["classifier positive"] - found["classifier negative"]
    assert torch.allclose(lemma, found["classifier gradient"])


def test_lemma_one_is_not_exact_where_they_differ() -> None:
    labels = torch.arange(30) % 3
    found = predictions(random(30, 5), labels, random(3, 5, seed=1), None, lr=0.1)
    lemma = found["classifier positive"] - found["classifier negative"]
    assert float(torch.linalg.matrix_norm(lemma - found["classifier gradient"])) > 1e-3


def test_lemma_two_is_exact_for_free_features() -> None:
    """It is linear in p, so means over a class change nothing, whatever the features."""
    labels = torch.arange(30) % 3
    found = predictions(random(30, 5), labels, random(3, 5, seed=1), random(3, seed=2), lr=0.1)
    assert torch.allclose(found["features lemma"], found["features free"], atol=1e-14)


# -- comparing --------------------------------------------------------------------------------------------------------
def test_agreement_of_known_vectors() -> None:
    """True (3, 4), predicted (0, 4): off by 3 of 5; cosine 16/(5·4); length 5/4."""
    agreement = Agreement(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 4.0]]))
    assert (float(agreement.deviation), float(agreement.cosine), float(agreement.ratio)) == pytest.approx(
        (0.6, 0.8, 1.25)
    )


def test_differences_over_pairs_and_selected_classes() -> None:
    """Three clients have classes {0, 1}, {1, 2} and {1}; their updates are 1, 10 and 100 times the class number."""
    counts = torch.tensor([[5.0, 5, 0, 0], [0, 5, 5, 0], [0, 5, 0, 0]])
    classes = torch.arange(4.0).unsqueeze(1)
    sides = Sides([{"counts": counts[i], "classifier update": 10**i * classes} for i in range(3)])
    assert sides.classifier("update", "both").flatten().tolist() == [-9, -99, -90]  # class 1, pairs 01, 02, 12
    assert sides.classifier("update", "one").flatten().tolist() == [0, -18, 0, -180]  # 01: 0 and 2, 02: 0, 12: 2
    assert sides.classifier("update", "none").flatten().tolist() == [-27, -198, -297, 0, -270]
    assert len(sides.classifier("update")) == 12


# -- training clients -------------------------------------------------------------------------------------------------
def with_lemmas(blobs: DataSet, algorithm: str = "fedavg", **more: object) -> Experiment:
    config = small(algorithm, engine={"workers": 1}, **more)
    return Experiment.from_config(config, data=blobs, extra=[Lemmas()])


def findings(experiment: Experiment) -> dict[tuple[int, str, str, str], Finding]:
    state = experiment.training.init()
    plan = experiment.training.plan(state, experiment.config.local.in_round(0))
    found = compare_lemmas(*both_trainings(experiment.engine(), plan, experiment.cohort(0), lambda _: {}))
    return {(one.lemma, one.training, one.true, one.predicted): one for one in found if one.classes in ("all", "both")}


def median(values: Tensor) -> float:
    return float(values.median())


def test_without_weight_decay_the_updates_of_fedavg_are_the_cross_entropy_steps(blobs: DataSet) -> None:
    found = findings(with_lemmas(blobs, local={"weight_decay": 0.0}))
    for training in ("one full-batch step", "local training"):
        assert float(found[1, training, "update", "exact steps"].agreement.deviation.max()) < 1e-3
        assert float(found[2, training, "free features", "lemma"].agreement.deviation.max()) < 1e-9
        lemma = found[1, training, "update", "lemma"].agreement
        assert 1e-4 < median(lemma.deviation) < 0.5  # an assumption, not an identity; but a good one here
        assert median(lemma.cosine) > 0.9


def test_weight_decay_momentum_and_calibration_differ_from_the_cross_entropy_steps(blobs: DataSet) -> None:
    plain = findings(with_lemmas(blobs, local={"weight_decay": 0.0}))
    key = (1, "local training", "update", "exact steps")
    for experiment in (
        with_lemmas(blobs, local={"weight_decay": 0.5}),
        with_lemmas(blobs, local={"weight_decay": 0.0, "momentum": 0.9}),
        with_lemmas(blobs, "fedfa", local={"weight_decay": 0.0}),
    ):
        other = findings(experiment)
        assert median(other[key].agreement.deviation) > 20 * median(plain[key].agreement.deviation)


def test_lemma_two_on_features_without_weights(blobs: DataSet) -> None:
    """Logistic regression: the features are the inputs and cannot change, whatever the lemma predicts."""
    found = findings(with_lemmas(blobs, model={"name": "logistic"}))
    change = found[2, "local training", "features", "lemma"].agreement
    assert float(change.true.abs().max()) == 0
    assert float(change.predicted.abs().max()) > 0


def test_recording_the_lemmas_does_not_change_training(blobs: DataSet) -> None:
    plain = Experiment.from_config(small("fedfa", engine={"workers": 1}), data=blobs)
    recorded = with_lemmas(blobs, "fedfa")
    results = []
    for experiment in (plain, recorded):
        plan = experiment.training.plan(experiment.training.init(), experiment.config.local.in_round(0))
        results.append(list(experiment.engine().train(plan, experiment.cohort(0), lambda _: {})))
    for one, other in zip(*results, strict=True):
        for group, entry in one.contribution.items():
            assert all(
                torch.equal(value, other.contribution[group].tensors[name]) for name, value in entry.tensors.items()
            )


# -- the command ------------------------------------------------------------------------------------------------------
def fedfa(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["fedfa", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def test_the_command_prints_the_comparison(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From a preset and from a run directory, which it does not modify."""
    monkeypatch.chdir(tmp_path)
    options = ["--set", "local.epochs=1", "--set", "engine.workers=1", "--data-dir", str(data_dir)]
    options += ["--preset", "digits-c2", "--algorithm", "moon"]
    assert fedfa(monkeypatch, "theory", *options, "--clients", "3", "--out", "initial.json") == 0
    printed = capfd.readouterr().out
    assert "moon on digits, 3 clients of round 1" in printed
    assert "Lemma 1, classifier updates: one full-batch step" in printed
    assert "assumes that" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert fedfa(monkeypatch, "run", *options, "--rounds", "2", "--out", "trained") == 0
    before = {file: file.read_bytes() for file in sorted(Path("trained").rglob("*")) if file.is_file()}
    assert fedfa(monkeypatch, "theory", "trained", "--clients", "3", "--out", "new/trained.json") == 0
    assert "3 clients of round 3" in capfd.readouterr().out
    assert before == {file: file.read_bytes() for file in sorted(Path("trained").rglob("*")) if file.is_file()}
    initial, trained = (json.loads(Path(name).read_text()) for name in ("initial.json", "new/trained.json"))
    assert initial["rows"][0]["number"] == 30  # 3 pairs, 10 classes
    assert "Theorem 4 and the measured overhead compare FedFA with FedAvg" in " ".join(printed.split())
    assert initial["lemma 3"]["change"] < initial["lemma 3"]["mended bound"]
    assert sum(row["number"] for row in initial["theorem 1"]) == 30
    assert initial["rows"][0]["deviation"] != trained["rows"][0]["deviation"]


def test_the_command_trains_first_with_after(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--preset", "digits-c2", "--algorithm", "fedfa", "--set", "local.epochs=1", "--set", "engine.workers=1"]
    assert fedfa(monkeypatch, "theory", *options, "--data-dir", data_dir, "--after", "1", "--clients", "2") == 0
    printed = capfd.readouterr().out
    assert "2 clients of round 2" in printed
    assert "smaller A" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["theory"], 2, "name a run directory, or --preset"),
        (["theory", "somewhere", "--preset", "digits-c2"], 2, "has its own config"),
        (["theory", "nowhere"], 1, "holds no run"),
        (["theory", "--preset", "digits-c2", "--algorithm", "centralised"], 1, "no clients to compare"),
        (["theory", "--preset", "digits-c2", "--out", "."], 1, "it is a directory; name a file"),
        (["theory", "somewhere", "--data-dir", "elsewhere"], 2, "has its own config"),
    ],
)
def test_wrong_arguments_are_errors(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    arguments: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDFA_DATA", str(data_dir))
    assert fedfa(monkeypatch, *arguments) == code
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())


def test_a_run_without_checkpoint_is_an_error(
    tmp_path: Path, blobs: DataSet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run(small("fedavg"), tmp_path / "run", data=blobs)
    (tmp_path / "run" / "checkpoint.safetensors").unlink()
    assert fedfa(monkeypatch, "theory", tmp_path / "run") == 1
    assert "no checkpoint.safetensors" in capfd.readouterr().err
