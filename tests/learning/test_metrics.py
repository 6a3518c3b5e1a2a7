"""Metrics against scikit-learn, closed forms, and each other."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from fedfa.errors import ConfigError, RunError
from fedfa.learning.evaluate import judge, mean_evaluation
from fedfa.learning.metrics import averages, metric, name_of, probabilities

Drawn = tuple[np.ndarray, np.ndarray]


@st.composite
def drawn(draw: st.DrawFn, classes: int | None = None) -> Drawn:
    """Labels of all classes at least once, and scores with many ties."""
    count = draw(st.integers(2, 5)) if classes is None else classes
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = np.concatenate([np.arange(count), rng.integers(0, count, draw(st.integers(0, 60)))])
    scores = rng.integers(-2, 3, (len(labels), count)).astype(np.float32) / draw(st.sampled_from([1, 3]))
    return labels, scores


@given(drawn())
def test_they_are_scikit_learn_s(found: Drawn) -> None:
    y, scores = found
    shares, predicted = probabilities(scores), scores.argmax(1)
    assert shares is not None
    classes = np.arange(scores.shape[1])
    hot = y[:, None] == classes
    expected = {
        "balanced_accuracy": sklearn.balanced_accuracy_score(y, predicted),
        "macro_f1": sklearn.f1_score(y, predicted, average="macro", labels=classes),
        "auroc": np.mean([sklearn.roc_auc_score(hot[:, c], shares[:, c]) for c in classes]),
        "average_precision": np.mean([sklearn.average_precision_score(hot[:, c], shares[:, c]) for c in classes]),
        "f1:1": sklearn.f1_score(y == 1, predicted == 1),
        "recall:0": sklearn.recall_score(y == 0, predicted == 0),
    }
    for name, value in expected.items():
        assert metric(name)(y, scores) == pytest.approx(value, abs=1e-12), name
    assert metric("confusion_matrix")(y, scores) == sklearn.confusion_matrix(y, predicted, labels=classes).tolist()


@given(drawn())
def test_top_1_is_the_accuracy_and_top_all_is_1(found: Drawn) -> None:
    y, scores = found
    assert metric("top:1")(y, scores) == pytest.approx((scores.argmax(1) == y).mean())
    assert metric(f"top:{scores.shape[1]}")(y, scores) == 1.0


def test_top_k_of_distinct_scores_is_scikit_learn_s() -> None:
    rng = np.random.default_rng(1)
    y, scores = rng.integers(0, 6, 200), rng.standard_normal((200, 6))
    for k in (1, 2, 3, 5):
        assert metric(f"top:{k}")(y, scores) == pytest.approx(sklearn.top_k_accuracy_score(y, scores, k=k))


def test_calibration_error_by_hand() -> None:
    """Four predictions with confidence 0.8, three of them right: |0.75 − 0.8|; four with 0.6, all right: |1 − 0.6|.

    Both fall into bins of their own, so the error is (4·0.05 + 4·0.4)/8 = 0.225. In a single bin: |7/8 − 0.7| = 0.175.
    """
    shares = np.array([[0.8, 0.2]] * 4 + [[0.6, 0.4]] * 4)
    y = np.array([0, 0, 0, 1, 0, 0, 0, 0])
    assert metric("calibration_error")(y, np.log(shares)) == pytest.approx(0.225)
    assert metric("calibration_error:1")(y, np.log(shares)) == pytest.approx(0.175)


def test_classes_without_samples_do_not_count() -> None:
    """Class 2 has no samples, but one is predicted so: recall and F1 are means over classes 0 and 1."""
    y = np.array([0, 0, 1, 1])
    scores = np.eye(3)[[0, 2, 1, 1]]
    assert metric("balanced_accuracy")(y, scores) == pytest.approx((1 / 2 + 1) / 2)
    assert metric("macro_f1")(y, scores) == pytest.approx((2 / 3 + 1) / 2)
    assert metric("auroc:2")(y, scores) is None
    assert metric("auroc")(np.zeros(4, dtype=np.int64), scores) is None


def test_scores_that_are_not_finite_have_no_probabilities() -> None:
    scores = np.array([[math.nan, 0.0], [0.0, 1.0]])
    assert metric("auroc")(np.array([0, 1]), scores) is None
    assert metric("calibration_error")(np.array([0, 1]), scores) is None
    assert metric("top:1")(np.array([0, 1]), scores) == 0.5


def test_with_domains_a_metric_is_the_mean_over_domains() -> None:
    """Domain a: 8 samples, all right. Domain b: 2 samples, one right: macro F1 of b is (2/3 + 0)/2 = 1/3, so 2/3."""
    y = torch.tensor([0, 1] * 4 + [0, 1])
    scores = torch.eye(2)[torch.tensor([0, 1] * 4 + [0, 0])]
    found = {"hit": scores.argmax(1) == y, "loss": torch.zeros(10), "scores": scores}
    domains = torch.tensor([0] * 8 + [1] * 2)
    chosen = [metric("macro_f1"), metric("confusion_matrix")]
    made = judge(found, y, 2, domains=domains, domain_names=("a", "b"), metrics=chosen)
    assert made.metrics["macro_f1"] == pytest.approx((1 + 1 / 3) / 2)
    assert made.domain_metrics["b"]["macro_f1"] == pytest.approx(1 / 3)
    assert made.metrics["confusion_matrix"] == [[5, 0], [1, 4]]
    assert made.accuracy == pytest.approx(0.75)
    labels = averages(chosen, domains=True, clients=False)
    assert labels == {
        "accuracy": "samples, domains", "macro_f1": "classes, domains", "confusion_matrix": "counts",
        "loss": "samples", "class_accuracy": "samples",
    }  # fmt: skip
    other = judge(found, y, 2, domains=torch.zeros(10, dtype=torch.int64), domain_names=("a", "b"), metrics=chosen)
    both = mean_evaluation([made, other])  # domain a: two clients, b: one
    of_a = (1.0 + float(other.domain_metrics["a"]["macro_f1"])) / 2  # type: ignore[arg-type]  # a number
    assert both.metrics["macro_f1"] == pytest.approx((of_a + 1 / 3) / 2)
    assert averages(chosen, domains=True, clients=True)["macro_f1"] == "classes, clients, domains"


def test_a_function_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def right(labels, scores):\n    return (scores.argmax(-1) == labels).mean()\n")
    y, scores = np.array([0, 1]), np.eye(2)[[0, 0]]
    assert metric(f"{file}:right")(y, scores) == 0.5

    def broken(labels: np.ndarray, scores: np.ndarray) -> float:
        raise KeyError("nothing")

    name = name_of(broken)
    assert name == "own:broken"
    with pytest.raises(RunError, match=r"metric 'own:broken': KeyError"):
        metric(name, {name: broken})(y, scores)
    with pytest.raises(RunError, match="returned 'text'"):
        metric("own:x", {"own:x": lambda labels, scores: "text"})(y, scores)
    with pytest.raises(ConfigError, match="give it again"):
        metric(name)
    with pytest.raises(ConfigError, match="has no 'wrong'"):
        metric(f"{file}:wrong")


@pytest.mark.parametrize("name", ["macro-f1", "top:0", "top", "f1:x", "auroc:-1", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown metric"):
        metric(name)
