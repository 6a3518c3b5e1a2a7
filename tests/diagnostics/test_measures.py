"""Every measure against a value derived by hand, or against a second computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedfa.diagnostics import measures


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


# -- feature distance -------------------------------------------------------------------------------------------------
FEATURES = torch.tensor(
    [  # three clients, three samples (two of class 0, one of class 1), two dimensions
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        [[3.0, 4.0], [6.0, 8.0], [1.0, 0.0]],
        [[0.0, 1.0], [0.0, 3.0], [0.0, 7.0]],
    ]
)
LABELS = torch.tensor([0, 0, 1])


def test_distances_are_between_features_of_the_same_sample() -> None:
    distances = measures.feature_distances(FEATURES)
    assert distances[0, 1].tolist() == [5, 10, 1]
    assert distances[0, 2].tolist() == [1, 3, 7]
    assert torch.equal(distances, distances.transpose(0, 1))
    assert distances.diagonal().eq(0).all()


def test_the_distance_of_a_class_is_the_mean_over_its_samples_and_all_pairs() -> None:
    """Class 1 has the one sample: pairs 01, 02, 12 are 1, 7 and √(1 + 49)."""
    by_class = measures.distance_by_class(measures.feature_distances(FEATURES), LABELS, 2)
    assert by_class[1] == pytest.approx((1 + 7 + math.sqrt(50)) / 3)
    # class 0: pair 01 (5 + 10)/2, pair 02 (1 + 3)/2, pair 12 from (3,3) and (6,5)
    assert by_class[0] == pytest.approx((7.5 + 2 + (math.sqrt(18) + math.sqrt(61)) / 2) / 3)


def test_with_a_class_mask_only_pairs_that_both_have_the_class_count() -> None:
    has_class = torch.tensor([[True, False], [True, True], [False, False]])
    by_class = measures.distance_by_class(measures.feature_distances(FEATURES), LABELS, 2, has_class)
    assert by_class[0] == pytest.approx(7.5)  # clients 0 and 1 alone
    assert by_class[1].isnan()  # no pair shares class 1


def test_a_class_without_samples_has_no_distance() -> None:
    assert measures.distance_by_class(measures.feature_distances(FEATURES), LABELS, 3)[2].isnan()


def test_the_mean_over_pairs_leaves_the_diagonal_out_so_the_reference_codes_mean_is_smaller_by_a_factor() -> None:
    """With the K zeros of the diagonal the sum over K(K−1) ordered pairs is divided by K²: the factor is (K−1)/K."""
    matrix = measures.feature_distances(random(5, 7, 3)).mean(-1)
    assert float(matrix.mean()) == pytest.approx(float(measures.pairs_mean(matrix)) * 4 / 5)


# -- similarity of pairs ----------------------------------------------------------------------------------------------
def unit(degrees: float) -> list[float]:
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]


def test_histograms_count_pairs_of_different_clients_by_class() -> None:
    """Client 0 at 0° (class 0) and 100° (class 1), client 1 at 60° and 160°, any lengths.

    Positive pairs: 0°–60° and 100°–160°, both cos 60° = ½. Negative: 0°–160° (cos −0.940) and 100°–60° (cos 0.766).
    With bins of width 0.05 from −1, ½ begins bin 30, −0.940 lies in bin 1 and 0.766 in bin 35.
    """
    features = torch.tensor([[unit(0), unit(100)], [unit(60.001), unit(159.999)]]) * torch.tensor([[[2.0], [0.5]]])
    labels = torch.tensor([0, 1])
    positive, negative = measures.pair_similarities(features, labels, torch.ones(2, 2, dtype=torch.bool))
    assert positive.pairs == negative.pairs == 2
    assert torch.nonzero(negative.counts).flatten().tolist() == [1, 35]
    assert positive.counts[29] + positive.counts[30] == 2
    assert positive.mean == pytest.approx(0.5, abs=1e-4)
    assert negative.mean == pytest.approx((math.cos(math.radians(160)) + math.cos(math.radians(40))) / 2, abs=1e-4)


def test_clients_count_on_their_own_samples_only() -> None:
    own = torch.tensor([[True, False], [True, True]])
    positive, negative = measures.pair_similarities(random(2, 2, 3), torch.tensor([0, 1]), own)
    assert (positive.pairs, negative.pairs) == (1, 1)


def test_the_cosine_of_equal_features_is_in_the_last_bin() -> None:
    same = random(1, 4, 5).expand(2, 4, 5)
    positive, _ = measures.pair_similarities(same, torch.arange(4), torch.ones(2, 4, dtype=torch.bool))
    assert positive.counts[-1] == positive.pairs == 4


def test_a_zero_feature_has_no_cosine() -> None:
    features = torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]])
    positive, negative = measures.pair_similarities(features, torch.tensor([0]), torch.ones(2, 1, dtype=torch.bool))
    assert positive.pairs == negative.pairs == 0
    assert math.isnan(positive.mean)


# -- CKA --------------------------------------------------------------------------------------------------------------
def test_cka_is_one_for_rotated_scaled_and_shifted_features() -> None:
    """Rotation Q, scale s, shift t: centring removes t, (s X Q)(s X Q)ᵀ = s² X Xᵀ."""
    x = random(20, 6)
    q, _ = torch.linalg.qr(random(6, 6, seed=1))
    cka = measures.linear_cka(torch.stack([x, -3.5 * x @ q + random(6, seed=2)]))
    assert torch.allclose(cka, torch.ones(2, 2, dtype=torch.float64))


def test_cka_is_not_one_after_a_map_that_is_no_rotation() -> None:
    x = random(20, 6)
    assert float(measures.linear_cka(torch.stack([x, x @ torch.diag(torch.arange(1.0, 7)).double()]))[0, 1]) < 0.9


def test_cka_of_single_columns_is_their_squared_correlation() -> None:
    """X = x, Y = y centred columns: ⟨xxᵀ, yyᵀ⟩ = (x·y)², so CKA = (x·y)² / (|x|² |y|²)."""
    x, y = random(2, 30, 1, seed=3)
    r = np.corrcoef(x[:, 0].numpy(), y[:, 0].numpy())[0, 1]
    assert float(measures.linear_cka(torch.stack([x, y]))[0, 1]) == pytest.approx(r**2)


def test_cka_equals_its_definition_by_cross_products() -> None:
    x, y = random(2, 15, 4, seed=4)
    x, y = x - x.mean(0), y - y.mean(0)
    expected = (y.mT @ x).square().sum() / ((x.mT @ x).square().sum().sqrt() * (y.mT @ y).square().sum().sqrt())
    assert float(measures.linear_cka(torch.stack([x, y]))[0, 1]) == pytest.approx(float(expected))


# -- updates ----------------------------------------------------------------------------------------------------------
def test_cosines_of_known_classifier_updates_row_by_row() -> None:
    updates = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], [[5.0, 0.0], [0.0, -1.0], [1.0, 1.0]]])
    rows = measures.row_cosines(updates)
    assert rows[0, 1, :2].tolist() == [1, -1]
    assert rows[0, 1, 2].isnan()  # the first client did not change that row
    assert measures.pairs_mean(rows)[:2].tolist() == [1, -1]


def test_whole_updates_of_two_clients() -> None:
    """u = (3, 0), v = (0, 4): their mean is (1.5, 2), each is |(1.5, −2)| = 2.5 from it; 6.25 / 12.5 = ½ = 1/K."""
    drift = measures.drift(
        measures.gram([[torch.tensor([3.0]), torch.tensor([[0.0]])], [torch.zeros(1), torch.tensor([[4.0]])]])
    )
    assert drift.norms.tolist() == [3, 4]
    assert drift.to_mean.tolist() == [2.5, 2.5]
    assert float(measures.pairs_mean(drift.cosines)) == 0
    assert float(drift.agreement) == pytest.approx(0.5)


def test_equal_updates_agree_fully_and_opposite_ones_not_at_all() -> None:
    one = random(50)
    assert float(measures.drift(measures.gram([[one], [one], [one]])).agreement) == pytest.approx(1)
    opposed = measures.drift(measures.gram([[one], [-one]]))
    assert float(opposed.agreement) == pytest.approx(0, abs=1e-12)
    assert float(opposed.cosines[0, 1]) == pytest.approx(-1)


def test_clients_that_did_not_move_have_a_norm_but_no_direction() -> None:
    drift = measures.drift(measures.gram([[torch.zeros(3)], [torch.zeros(3)]]))
    assert drift.norms.tolist() == [0, 0]
    assert drift.cosines.isnan().all()
    assert drift.agreement.isnan()


def test_inner_products_of_tensors_longer_than_one_chunk() -> None:
    """Longer than one chunk of 2²⁰: (2²⁰ + 5) ones have that many as their square."""
    size = (1 << 20) + 5
    assert measures.gram([[torch.ones(size)], [2 * torch.ones(size)]]).tolist() == [
        [size, 2 * size],
        [2 * size, 4 * size],
    ]


# -- classifier -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_gradient_of_the_classifier_is_autograds(with_bias: bool) -> None:
    features, labels = random(12, 5), torch.arange(12) % 3
    weight = random(3, 5, seed=1).requires_grad_()
    bias = random(3, seed=2) if with_bias else None
    functional.cross_entropy(functional.linear(features, weight, bias), labels).backward()
    assert weight.grad is not None
    assert torch.allclose(measures.classifier_gradient(features, labels, weight.detach(), bias), weight.grad)


def test_the_gradient_of_an_undecided_classifier() -> None:
    """Weights zero, two classes: p = ½, so the rows are ∓h/2 for one sample h of class 0, and the norm is |h|/√2."""
    gradient = measures.classifier_gradient(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), torch.zeros(2, 2), None)
    assert gradient.tolist() == [[-1.5, -2.0], [1.5, 2.0]]
    assert float(torch.linalg.matrix_norm(gradient)) == pytest.approx(5 / math.sqrt(2))


def test_at_orthogonal_anchors_the_gradient_is_that_of_the_papers_theorem() -> None:
    """Features on orthogonal anchors: n² ‖∇φ_c‖² = A_c² ‖a_c‖² + Σ_{c'≠c} B_c'² ‖a_c'‖².

    A_c = n_c (1 − p_c^(c)) and B_c' = n_c' p_c^(c'), the numbers of the theorem on the loss's Lipschitzness.
    """
    anchors = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    counts = torch.tensor([4, 2, 1])
    labels = torch.repeat_interleave(torch.arange(3), counts)
    weight = random(3, 3)
    p = measures.scores(anchors, weight, None).softmax(-1)  # [c', c]
    size = anchors.square().sum(1)
    expected = []
    for c in range(3):
        a = counts[c] * (1 - p[c, c])
        b = sum(counts[o] ** 2 * p[o, c] ** 2 * size[o] for o in range(3) if o != c)
        expected.append(float((a**2 * size[c] + b) / 7**2))
    gradient = measures.classifier_gradient(anchors[labels], labels, weight, None)
    assert gradient.square().sum(1).tolist() == pytest.approx(expected)


# -- anchors ----------------------------------------------------------------------------------------------------------
def test_geometry_of_moved_anchors() -> None:
    """a₀: (1, 0) → (1, 0); a₁: (0, 1) → (3, 4): length 5, moved |(3, 3)| = √18, cosine with a₀ 3/5."""
    found = measures.anchor_geometry(torch.eye(2), torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
    assert found["norms"].tolist() == [1, 5]
    assert found["movement"].tolist() == pytest.approx([0, math.sqrt(18)])
    assert float(found["cosines"][0, 1]) == pytest.approx(0.6)
