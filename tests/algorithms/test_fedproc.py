"""FedProc: the prototype-contrastive loss by hand, its schedule, and whole rounds against a transcription by autograd.

Two classes unless a test says otherwise, with prototypes p₀ = (2, 0) and p₁ = (0, 3), τ = ½.
"""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms.fedproc import (
    FedProc,
    contrast_weight,
    prototype_contrastive_loss,
)
from fedfa.learning.context import ClientContext
from fedfa.learning.tensors import clone
from tests.algorithms.federation_harness import Federation
from tests.algorithms.toy import (
    CLASSES,
    EPOCHS,
    FEATURES,
    HELD,
    assert_clients_leave_no_trace,
    batch_of,
    batches_of,
    client_context,
    descend,
    features_of,
    toy_federation,
    toy_samples,
)

LR = 0.1


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


PROTOTYPES = numbers([2, 0], [0, 3])
ALL = numbers([1], [1])
Z, Y = numbers([3, 4], [7, 0]), torch.tensor([0, 1])
"""Cosines with p₀ and p₁: (0.6, 0.8) for the first sample, of class 0; (1, 0) for the second, of class 1."""
FIRST, SECOND = log(1 + exp(0.4)), log(1 + exp(2))
"""Their losses: log(1 + e^((0.8 − 0.6)/½)) and log(1 + e^((1 − 0)/½))."""


def directions(prototypes: Tensor) -> Tensor:
    return functional.normalize(prototypes, dim=-1)


def begun(
    round: int = 1, rounds: int = 4, known: Tensor = ALL, prototypes: Tensor = PROTOTYPES, **options: Any
) -> tuple[FedProc, ClientContext]:
    """A component and a client that has begun its round."""
    component = FedProc(**options)
    ctx = client_context(prototypes, [1] * len(prototypes))
    ctx.broadcast["fedproc"] = {"prototypes": prototypes, "known": known}
    ctx.round, ctx.rounds = round, rounds
    component.begin(ctx)
    return component, ctx


# -- the loss by hand -----------------------------------------------------------------------------------------------
def test_the_loss_of_each_sample_by_hand() -> None:
    assert_close(prototype_contrastive_loss(Z, Y, directions(PROTOTYPES), ALL, tau=0.5), numbers(FIRST, SECOND))


def test_the_gradient_by_hand_points_away_from_the_own_prototype() -> None:
    """For (3, 4) of class 0: σ(0.4)/τ · (Δ − 0.2·direction)/5 with Δ = (0, 1) − (1, 0), as a descent moves to p₀."""
    z = Z[:1].clone().requires_grad_()
    prototype_contrastive_loss(z, Y[:1], directions(PROTOTYPES), ALL, tau=0.5).sum().backward()
    sigma = 1 / (1 + exp(-0.4))
    assert z.grad is not None
    assert_close(z.grad, numbers([2 * sigma * -0.224, 2 * sigma * 0.168]))
    moved = z.detach() - 0.1 * z.grad
    before, after = (functional.cosine_similarity(x, PROTOTYPES[:1]) for x in (Z[:1], moved))
    assert after > before


def test_lengths_do_not_matter() -> None:
    scaled = prototype_contrastive_loss(10 * Z, Y, directions(7 * PROTOTYPES), ALL, tau=0.5)
    assert_close(scaled, numbers(FIRST, SECOND))


def test_a_class_without_prototype_is_no_part_of_the_sum_and_its_samples_have_no_loss() -> None:
    """A third class without prototype changes nothing for the others; its own sample's loss is 0, its gradient too."""
    three = directions(numbers([2, 0], [0, 3], [0, 0]))
    z = torch.cat([Z, numbers([1, 1])]).requires_grad_()
    each = prototype_contrastive_loss(z, torch.tensor([0, 1, 2]), three, numbers([1], [1], [0]), tau=0.5)
    assert_close(each.detach(), numbers(FIRST, SECOND, 0))
    each.sum().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    assert torch.equal(z.grad[2], numbers(0, 0))


# -- the schedule ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("done", "weight"), [(0, 1.0), (50, 0.5), (75, 0.25), (100, 0.0)])
def test_the_contrast_gives_way_to_the_cross_entropy(done: int, weight: float) -> None:
    assert contrast_weight(done, 100) == weight


@pytest.mark.parametrize(("done", "weight"), [(0, 1.0), (2, 0.5), (3, 0.25)])
def test_the_loss_mixes_contrast_and_cross_entropy(done: int, weight: float) -> None:
    """(1 − t/T) · mean of ℓ_gpc + (t/T) · cross-entropy, here 10."""
    component, ctx = begun(round=done)
    found = component.loss(ctx, batch_of(Z, Y), numbers(10).squeeze())
    assert_close(found, numbers(weight * (FIRST + SECOND) / 2 + (1 - weight) * 10).squeeze())


def test_at_the_end_the_cross_entropy_is_left_alone() -> None:
    component, ctx = begun(round=4)
    loss = numbers(10).squeeze()
    assert component.loss(ctx, batch_of(Z, Y), loss) is loss


def test_without_any_prototype_the_cross_entropy_is_left_alone() -> None:
    component, ctx = begun(round=0, known=torch.zeros_like(ALL))
    loss = numbers(10).squeeze()
    assert component.loss(ctx, batch_of(Z, Y), loss) is loss


def test_samples_without_prototype_leave_their_share_to_the_cross_entropy() -> None:
    """t/T = ¼, class 1 unknown: half of the batch. (1 − ¾·½)·10 + ¾·(0 + 0)/2, as one known class alone has loss 0."""
    component, ctx = begun(round=1, known=numbers([1], [0]))
    assert_close(component.loss(ctx, batch_of(Z, Y), numbers(10).squeeze()), numbers(6.25).squeeze())


def test_the_method_depends_on_the_planned_number_of_rounds() -> None:
    assert FedProc.traits.horizon


# -- the prototypes -------------------------------------------------------------------------------------------------
def test_prototypes_by_momentum_by_hand() -> None:
    """Class 0 has p₀ = (2, 0); epoch 1 has mean (4, 2), epoch 2 mean (0, 6). λ = ½.

    ā = ½ p₀ + ½ (4, 2) = (3, 1), then ½ (3, 1) + ½ (0, 6) = (1.5, 3.5). Class 1 has no prototype yet: only its latest
    epoch counts, (5, 5). Class 2 is not met (its p = (1, 1) stays with the server): weight 0.
    """
    prototypes, known = numbers([2, 0], [0, 0], [1, 1]), numbers([1], [0], [1])
    component, ctx = begun(prototypes=prototypes, known=known)
    ctx.label_counts, ctx.batches_per_epoch = torch.tensor([2, 1, 3]), 1
    for features in ([[3, 1], [5, 3], [9, 9]], [[0, 2], [0, 10], [5, 5]]):
        component.after_step(ctx, batch_of(numbers(*features), [0, 0, 1]))
        component.after_epoch(ctx)
    sums = component.contribute(ctx)["prototypes"]
    assert_close(sums.weight, torch.tensor([[2.0], [1.0], [0.0]]), check_dtype=False)
    assert_close(sums.tensors["prototypes"][:2], numbers([2 * 1.5, 2 * 3.5], [5, 5]))
    assert torch.equal(sums.tensors["prototypes"][2], numbers(0, 0))


def transcribed_round(federation: Federation, client: int) -> tuple[dict[str, Tensor], Tensor]:
    """A client's round in plain torch: its weights, and its prototypes by momentum."""
    data, start = federation.clients[client], clone(federation.state.model)
    prototypes, known = (federation.state.components["fedproc"][name] for name in ("prototypes", "known"))
    weight = 1 - federation.state.round / federation.training.task.rounds
    there = [c for c in range(CLASSES) if known[c] > 0]

    def loss(h: Tensor, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        entropy = functional.cross_entropy(logits, y)
        chosen = [i for i, c in enumerate(y.tolist()) if c in there]
        if not chosen:
            return entropy
        cosines = functional.cosine_similarity(h[chosen].unsqueeze(1), prototypes[there], dim=-1) / 0.5
        position = torch.tensor([there.index(c) for c in y[chosen].tolist()])
        share = len(chosen) / len(y)
        return (1 - weight * share) * entropy + weight * share * functional.cross_entropy(cosines, position)

    trained, epochs = descend(start, data, batches_of(federation, client), LR, loss)
    averaged = prototypes.clone()
    for c in sorted(set(data.y.tolist())):
        for h, y in epochs:
            mean = h[y == c].mean(0)
            averaged[c] = 0.5 * averaged[c] + 0.5 * mean if known[c] > 0 else mean
    return trained, averaged


def test_rounds_are_the_paper_s() -> None:
    """The first cohort lacks classes, so the second round has samples without prototype (class 3)."""
    federation = toy_federation("fedproc", lr=LR, weight_decay=0.0)
    for cohort in ((0, 1), (0, 1, 2), (2,), (0, 1, 2)):
        expected = {client: transcribed_round(federation, client) for client in cohort}
        start, old = federation.state.model, federation.state.components["fedproc"]["prototypes"]
        federation.round(cohort)
        for result in federation.results:
            sums = result.contribution["fedavg/model"]
            for name, value in expected[result.client][0].items():
                assert_close(sums.tensors[name] / sums.weight, value - start[name], rtol=1e-9, atol=1e-11)
        counts = {client: federation.clients[client].label_counts for client in cohort}
        for c in range(CLASSES):
            holders = [client for client in cohort if counts[client][c] > 0]
            weights = numbers(*[int(counts[client][c]) for client in holders])
            mean = sum(w * expected[i][1][c] for w, i in zip(weights, holders, strict=True)) / weights.sum()
            assert_close(federation.state.components["fedproc"]["prototypes"][c], mean if holders else old[c])
    assert federation.state.components["fedproc"]["known"].squeeze().tolist() == [1, 1, 1, 1, 0]


def test_the_first_round_is_fedavg_s_to_the_last_bit() -> None:
    ours, plain = toy_federation("fedproc"), toy_federation("fedavg")
    ours.round()
    plain.round()
    for name, value in plain.state.model.items():
        assert torch.equal(ours.state.model[name], value), name


@pytest.mark.parametrize("weights", ["count", "uniform"])
def test_a_full_pass_gives_class_means_under_the_trained_models(weights: str) -> None:
    """Each client's own trained model; the server weighs clients that hold the class by its samples, or equally."""
    federation = toy_federation({"name": "fedproc", "fedproc": {"prototypes": "full-pass", "weights": weights}})
    start = federation.state.model
    expected, total = torch.zeros(CLASSES, FEATURES, dtype=torch.float64), torch.zeros(CLASSES, 1)
    federation.round()
    for result in federation.results:
        sums, data = result.contribution["fedavg/model"], federation.clients[result.client]
        trained = {name: start[name] + value / sums.weight for name, value in sums.tensors.items()}
        h = features_of(trained, data.x)
        for c in HELD[result.client]:
            weight = float((data.y == c).sum()) if weights == "count" else 1.0
            expected[c] += weight * h[data.y == c].mean(0)
            total[c] += weight
    assert_close(federation.state.components["fedproc"]["prototypes"], expected / total.clamp(min=1))


@pytest.mark.parametrize("prototypes", ["momentum", "full-pass"])
def test_clients_without_a_step_break_nothing(prototypes: str) -> None:
    federation = toy_federation(
        {"name": "fedproc", "fedproc": {"prototypes": prototypes}}, batch_size=64, drop_last=True
    )
    for _ in range(2):
        federation.round()
    known = federation.state.components["fedproc"]["known"]
    assert bool(known.any()) is (prototypes == "full-pass")  # gathered while training: there was none
    assert federation.state.components["fedproc"]["prototypes"].isfinite().all()


def test_a_class_without_trained_samples_does_not_become_a_prototype_of_zeros() -> None:
    """One epoch of one batch of four, drop_last: the five other samples, class 1 among them, are never seen."""
    x = np.concatenate([toy_samples(1)[0][0]] * 2)[:9]
    federation = toy_federation(
        {"name": "fedproc"}, [(x, np.zeros(9, dtype=np.int64))], batch_size=8, drop_last=True, epochs=1
    )
    left_out = next(i for i in range(9) if i not in batches_of(federation, 0)[0][0].tolist())
    federation.clients[0].y[left_out] = 1
    federation.clients[0].label_counts = torch.tensor([8, 1, 0, 0, 0])
    federation.round()
    assert federation.state.components["fedproc"]["known"].squeeze().tolist() == [1, 0, 0, 0, 0]


def test_one_client_with_one_class_works() -> None:
    """Its contrast over a single prototype is 0, so only the cross-entropy's share trains."""
    x, _ = toy_samples(1)[0]
    federation = toy_federation("fedproc", [(x, np.full(len(x), 3))], lr=LR)
    for _ in range(4):
        federation.round()
    assert federation.state.components["fedproc"]["known"].squeeze().tolist() == [0, 0, 0, 1, 0]
    assert all(value.isfinite().all() for value in federation.state.model.values())
    assert EPOCHS > 1  # so the momentum has something to average


@pytest.mark.parametrize("options", [{}, {"prototypes": "full-pass"}], ids=["default", "full pass"])
def test_clients_leave_no_trace(options: dict[str, Any]) -> None:
    assert_clients_leave_no_trace({"name": "fedproc", "fedproc": options})
