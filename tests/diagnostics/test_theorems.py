"""The theorems: formulas by hand, cases in which they are exact, and both sides on training clients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfa.data import DataSet
from fedfa.diagnostics.descent import Descent, OneRound, one_round
from fedfa.diagnostics.theorems import divergences, feature_deviations, operations, smoothness
from fedfa.diagnostics.theory import Lemmas, Sides, both_trainings, class_means, predictions
from fedfa.errors import FedfaError
from fedfa.experiment.experiment import Experiment
from fedfa.learning.tensors import Tensors
from fedfa.models import SplitModel, build_model
from tests.experiment.run_toys import small


def numbers(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -- Theorem 1 --------------------------------------------------------------------------------------------------------
def test_theorem_one_on_real_updates(blobs: DataSet) -> None:
    """Classes of neither client have no positive part; every row deviates, in all cases."""
    experiment = Experiment.from_config(small("fedavg", engine={"workers": 1}), data=blobs, extra=[Lemmas()])
    plan = experiment.training.plan(experiment.training.init(), experiment.config.local.in_round(0))
    one, _ = both_trainings(experiment.engine(), plan, experiment.cohort(0), lambda _: {})
    found = {each.classes: each for each in divergences(one)}
    assert found.keys() == {"both", "one", "none"}
    assert not found["none"].positive.any()
    assert all((each.deviation > 0).all() for each in found.values())
    torch.testing.assert_close(found["none"].deviation, found["none"].negative, rtol=0.3, atol=1e-3)
    assert found["one"].positive.median() > found["one"].negative.median()
    assert found["both"].positive.any(), "clients hold different samples of a class, so their means differ"


# -- Theorem 2 --------------------------------------------------------------------------------------------------------
def trained(p: Tensor, phi: Tensor, counts: Tensor) -> Tensors:
    return {"counts": counts, "trained probabilities": p, "trained classifier": phi}


def test_theorem_two_by_hand() -> None:
    """Two classes, p = (¾, ¼) on class 0 (only it is held by both), Δφ₀ = (1, 0), Δφ₁ = (0, 2), η = 0.1.

    Derived: 0.1 ((1, 0) − ¾ (1, 0) − ¼ (0, 2)) = (0.025, −0.05). Printed: −0.1 (1, 0) + (0.75, 0.5) = (0.65, 0.5).
    """
    p = numbers([0.75, 0.25], [0.0, 0.0])
    a = trained(p, numbers([2.0, 1.0], [0.0, 3.0]), numbers(5, 0))
    b = trained(p, numbers([1.0, 1.0], [0.0, 1.0]), numbers(5, 4))
    found = feature_deviations(Sides([a, b]), 0.1)
    expected = numbers([0.025, -0.05])
    for form in ("equal p, derived", "own p, derived"):
        torch.testing.assert_close(found[form].true, expected)
        torch.testing.assert_close(found[form].predicted, expected)
    torch.testing.assert_close(found["equal p, as printed"].predicted, numbers([0.65, 0.5]))
    assert feature_deviations(Sides([{**a, "counts": numbers(5, 0)}, {**b, "counts": numbers(0, 4)}]), 0.1) == {}


def test_theorem_two_derived_is_exact_for_equal_probabilities_whatever_they_are() -> None:
    torch.manual_seed(1)
    p = [torch.randn(4, 4, dtype=torch.float64).softmax(1) for _ in range(2)]
    sides = Sides([trained(each, torch.randn(4, 3, dtype=torch.float64), torch.ones(4)) for each in p])
    found = feature_deviations(sides, 0.3)
    assert float(found["equal p, derived"].deviation.max()) < 1e-12
    assert float(found["equal p, as printed"].deviation.min()) > 0.5
    assert float(found["own p, derived"].deviation.median()) > 0.01, "the assumption matters"


# -- Lemma 3 and Theorem 3 --------------------------------------------------------------------------------------------
ROUND = OneRound(
    lr=0.1, mu=0.5, steps=4, loss_before=2.0, loss_after=1.5, gradient=3.0, smoothness=1.0, lipschitz=2.0, variance=0.5,
    square=9.0, anchor_distance=1.5,
)  # fmt: skip


def test_the_bounds_by_hand() -> None:
    """−0.2·3 + 4·0.01·0.5 + 9·16·0.001/4 + 0.5·4·0.01·4·9 = −0.6 + 0.02 + 0.036 + 0.72.

    Mended: the third 0.001·9·4·3·7/12 = 0.063; moved = 2·4·0.1·3 = 2.4, so the fourth 0.5 (5.76 + 2·1.5·2.4) = 6.48.
    """
    assert ROUND.change == -0.5
    assert ROUND.bound == pytest.approx(0.176, rel=1e-12)
    assert ROUND.mended_bound == pytest.approx(-0.6 + 0.02 + 0.063 + 6.48, rel=1e-12)
    assert ROUND.step_condition == pytest.approx(0.4)


def test_theorem_three_by_hand() -> None:
    """(4·0.1·0.5 + 4·0.01·9 + 4·0.5·0.1·4·9)/4 = (0.2 + 0.36 + 7.2)/4; μ < (3 − 0.5 − 9)/36: there is none."""
    assert ROUND.least_epsilon == pytest.approx(1.94, rel=1e-12)
    assert ROUND.largest_mu == pytest.approx(-6.5 / 36, rel=1e-12)


def measured(blobs: DataSet, algorithm: str = "fedavg", **local: object) -> OneRound:
    options = {"algorithm": {"calibration": {"when": "never"}}} if algorithm == "fedfa" else {}
    config = small(algorithm, engine={"workers": 1}, local={"lr": 0.01, **local}, **options)
    experiment = Experiment.from_config(config, data=blobs, extra=[Descent()])
    mu = 0.1 if algorithm == "fedfa" else 0.0
    state, cohort = experiment.training.init(), experiment.cohort(0)
    return one_round(experiment.training, experiment.engine(), state, config.local, cohort, lambda _: {}, mu)


def test_the_losses_and_the_gradient_are_those_of_the_cohort(blobs: DataSet) -> None:
    config = small("fedavg", engine={"workers": 1}, local={"lr": 0.01})
    experiment = Experiment.from_config(config, data=blobs)
    cohort = experiment.cohort(0)
    model = experiment.task.model
    samples = [experiment.federation.client(client) for client in cohort]
    x, y = (torch.cat(each) for each in zip(*(s.batch(torch.arange(s.size)) for s in samples), strict=True))
    model.load(experiment.training.init().model)
    loss = functional.cross_entropy(model.module(x), y)
    gradient = torch.autograd.grad(loss, list(model.module.parameters()))
    found = measured(blobs)
    assert found.loss_before == pytest.approx(loss.item(), rel=1e-5)
    assert found.gradient == pytest.approx(sum(float(g.square().sum()) for g in gradient), rel=1e-4)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa"])
def test_small_steps_decrease_the_loss_as_the_lemma_says(algorithm: str, blobs: DataSet) -> None:
    """τ η L₁ far below ½: the change is about −τη‖∇L‖², and both bounds hold."""
    found = measured(blobs, algorithm, lr=1e-4)
    assert found.step_condition < 0.05
    assert found.change < 0
    assert found.change <= found.bound + 1e-6
    assert found.bound <= found.mended_bound
    if algorithm == "fedavg":
        assert found.change == pytest.approx(-found.steps * found.lr * found.gradient, rel=0.2)


def test_the_constants_are_larger_than_zero_and_one_batch_has_no_variance(blobs: DataSet) -> None:
    found = measured(blobs)
    assert min(found.smoothness, found.lipschitz, found.variance) > 0
    assert found.square >= found.gradient
    whole = measured(blobs, batch_size=10_000)
    assert whole.variance == pytest.approx(0, abs=1e-6)
    assert whole.steps == 2


def test_where_nothing_is_shared_there_is_no_lemma(blobs: DataSet) -> None:
    with pytest.raises(FedfaError, match="here they share none"):
        measured(blobs, "local")


# -- Theorem 4 --------------------------------------------------------------------------------------------------------
def at_anchors(anchors: Tensor, labels: Tensor, weight: Tensor) -> Tensors:
    """A client whose features are exactly the anchors of their classes."""
    features = anchors[labels]
    means = class_means(features, labels, weight, None)
    gradient = predictions(features, labels, weight, None, 1.0)["classifier gradient"]
    return {
        "counts": means.counts.squeeze(1), "trained probabilities": means.probabilities,
        "trained features": means.features, "trained gradient": gradient,
    }  # fmt: skip


def test_theorem_four_is_exact_for_features_at_orthogonal_anchors() -> None:
    torch.manual_seed(2)
    anchors = torch.eye(4, 6, dtype=torch.float64) * numbers(1.0, 2.0, 3.0, 0.5).unsqueeze(1)
    labels = [torch.tensor([0, 0, 1, 2]), torch.tensor([1, 1, 3, 3, 3])]
    weights = [torch.randn(2, 4, 6, dtype=torch.float64) for _ in range(2)]
    one, other = (Sides([at_anchors(anchors, y, w) for y, w in zip(labels, each, strict=True)]) for each in weights)
    found = smoothness(one, other, anchors)
    torch.testing.assert_close(found.measured, found.predicted)
    assert found.cosine == pytest.approx(0, abs=1e-12)
    assert len(found.smaller_a) == 4
    assert len(found.smaller_b) == 12


def test_theorem_fours_premise_by_hand() -> None:
    """One client, two classes, one sample each at e₀ and e₁. Logits ln 3: p = ¾; logits 0: p = ½."""
    anchors, labels = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])
    sure, unsure = (Sides([at_anchors(anchors, labels, scale * anchors)]) for scale in (math.log(3), 0.0))
    found = smoothness(sure, unsure, anchors)
    assert found.smaller_a.all()
    assert found.smaller_b.all()
    # (1/n²) [(1/16 − 1/4) + (1/16 − 1/4)] with n = 2
    torch.testing.assert_close(found.measured, numbers(-3 / 32, -3 / 32))


# -- operations -------------------------------------------------------------------------------------------------------
def test_the_count_of_operations_by_hand() -> None:
    """An MLP 12 → 5 → 4 → 3: (2·12 − 1)·5 + (2·5 − 1)·4 + (2·4 − 1)·3 = 115 + 36 + 21; G₂ = 4, G₃ = 21, G₄ = 12."""
    network = SplitModel.of(build_model("mlp", (12,), 3, {"hidden": [5, 4]}))
    found = operations(network, torch.zeros(2, 12))
    assert (found.network, found.anchor_loss, found.calibration, found.averaging) == (172, 4, 21, 12)
    assert found.as_printed == pytest.approx(1 + 25 / 172)
    assert found.per_batch(8) == pytest.approx(1 + (8 * 4 + 3 * 21) / (8 * 172))


def test_a_convolution_counts_at_every_place() -> None:
    """2 → 3 channels, 3×3 on 5×5: nine places, (2·18 − 1)·3·9 = 945; the classifier (2·27 − 1)·2 = 106."""
    network = SplitModel.of(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 2)))
    assert operations(network, torch.zeros(1, 2, 5, 5)).network == 945 + 106
