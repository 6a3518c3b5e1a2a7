"""FedProto: distances, prototypes, their average and the prediction by hand; models that stay where they are."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms.class_features import class_sums, membership
from fedfa.algorithms.fedproto import FedProto
from fedfa.algorithms.prototypes import prototype_sum, renew_prototypes
from fedfa.learning.aggregate import Aggregate
from fedfa.learning.client import MODEL
from fedfa.learning.context import ClientContext, Role, ServerStep
from tests.algorithms.federation_harness import Samples
from tests.algorithms.toy import (
    CLASSES,
    Network,
    assert_clients_leave_no_trace,
    assert_same_rounds,
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


PROTOTYPES = numbers([1, 0], [0, 1], [9, 9])
ALL = numbers([1], [1], [1])
H, Y = numbers([3, 0], [1, 1], [3, 1]), torch.tensor([0, 0, 1])
"""Squared distances to the prototype of their class: 4, 1 and 9. Class 2 is not in the batch."""


def begun(known: Tensor = ALL, **options: Any) -> tuple[FedProto, ClientContext]:
    component = FedProto(**options)
    ctx = client_context(PROTOTYPES, [2, 1, 0])
    ctx.broadcast["fedproto"] = {"prototypes": PROTOTYPES, "known": known}
    component.begin(ctx)
    return component, ctx


# -- the loss by hand -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("known", "distance"),
    [([[1], [1], [1]], 14 / 6), ([[1], [0], [0]], 5 / 6), ([[0], [0], [0]], 0.0)],
    ids=["all known", "class 1 unknown", "none known"],
)
def test_the_distance_per_sample_by_hand(known: list[list[int]], distance: float) -> None:
    """Mean square over 3 samples and 2 dimensions; a sample whose class has no prototype counts as at distance 0."""
    component, ctx = begun(numbers(*known), lam=2.0)
    assert_close(component.loss(ctx, batch_of(H, Y), numbers(10).squeeze()), numbers(10 + 2 * distance).squeeze())


def test_the_gradient_per_sample_by_hand() -> None:
    """2 (h − p_y) / (3·2)."""
    component, ctx = begun()
    h = H.clone().requires_grad_()
    component.loss(ctx, batch_of(h, Y), numbers(0).squeeze()).backward()
    assert_close(h.grad, numbers([2, 0], [0, 1], [3, 0]) / 3)


def test_the_distance_per_class_by_hand() -> None:
    """Means (2, ½) and (3, 1): √(1 + ¼) and 3. Class 2 is not in the batch and adds nothing."""
    component, ctx = begun(loss="class", lam=2.0)
    found = component.loss(ctx, batch_of(H, Y), numbers(10).squeeze())
    assert_close(found, numbers(10 + 2 * (sqrt(1.25) + 3)).squeeze())


def test_the_gradient_per_class_by_hand() -> None:
    """The unit vector from prototype to mean over the number of samples: (1, ½)/√1.25/2 twice, (1, 0); ‖·‖ not ‖·‖²."""
    component, ctx = begun(numbers([1], [1], [0]), loss="class")
    h = H.clone().requires_grad_()
    component.loss(ctx, batch_of(h, Y), numbers(0).squeeze()).backward()
    first = [1 / sqrt(1.25) / 2, 0.5 / sqrt(1.25) / 2]
    assert_close(h.grad, numbers(first, first, [1, 0]))


def test_a_mean_that_lies_on_its_prototype_has_a_finite_gradient() -> None:
    component, ctx = begun(loss="class")
    h = PROTOTYPES[:2].clone().requires_grad_()
    component.loss(ctx, batch_of(h, [0, 1]), numbers(0).squeeze()).backward()
    assert h.grad is not None
    assert h.grad.isfinite().all()


def test_without_weight_the_loss_is_left_alone() -> None:
    component, ctx = begun(lam=0.0)
    loss = numbers(10).squeeze()
    assert component.loss(ctx, batch_of(H, Y), loss) is loss


# -- the prototypes -------------------------------------------------------------------------------------------------
def test_class_sums_by_hand() -> None:
    sums, counts = class_sums(H, membership(Y, 3, H))
    assert_close(sums, numbers([4, 1], [3, 1], [0, 0]))
    assert_close(counts, numbers([2], [1], [0]))


def test_only_the_last_epoch_s_features_are_sent() -> None:
    """Two epochs of two batches; of the second: class 0 has (3, 0), (1, 1) and (5, 5), class 1 (3, 1)."""
    component, ctx = begun()
    for ctx.epoch, factor in ((0, 100), (1, 1)):
        component.after_step(ctx, batch_of(factor * H, Y))
        component.after_step(ctx, batch_of(factor * numbers([5, 5]), [0]))
    sums = component.contribute(ctx)["prototypes"]
    assert_close(sums.weight, numbers([3], [1], [0]), check_dtype=False)
    assert_close(sums.tensors["prototypes"], numbers([9, 6], [3, 1], [0, 0]))


@pytest.mark.parametrize(("weights", "expected"), [("count", [2.0, 1.0]), ("uniform", [3.0, 2.0])])
def test_the_server_s_mean_by_hand(weights: Any, expected: list[float]) -> None:
    """Class 0: (1, 0) of 3 samples and (5, 4) of one. Class 1: no client. Class 2: one client only.

    By count (3·(1, 0) + (5, 4))/4 = (2, 1), equally (3, 2); the client without class 0 does not pull it to zero.
    """
    total = Aggregate()
    for prototypes, counts in (
        ([[1, 0], [0, 0], [0, 0]], [3, 0, 0]),
        ([[5, 4], [0, 0], [7, 7]], [1, 0, 2]),
        ([[0, 0], [0, 0], [0, 0]], [0, 0, 0]),
    ):
        total.add({"fedproto/prototypes": prototype_sum(numbers(*prototypes), numbers(*counts).unsqueeze(-1), weights)})
    state = {"fedproto": {"prototypes": PROTOTYPES.clone(), "known": numbers([0], [1], [0])}}
    server = ServerStep(0, {}, state, total, 3, {}, np.random.default_rng(0))
    renew_prototypes(server, "fedproto")
    assert_close(server.state["fedproto"]["prototypes"], numbers(expected, [0, 1], [7, 7]))
    assert server.state["fedproto"]["known"].squeeze().tolist() == [1, 1, 1]


# -- the prediction -------------------------------------------------------------------------------------------------
LOGITS = numbers([0, 0, 1], [0, 0, 1])


def predicted(known: list[list[int]], **options: Any) -> list[int]:
    """Features (2, 0), nearest to (1, 0) of class 0, and (0, 3), nearest to (0, 1) of class 1."""
    broadcast = {"fedproto": {"prototypes": PROTOTYPES, "known": numbers(*known)}}
    component = FedProto(**options)
    scores: list[int] = component.predict(broadcast, numbers([2, 0], [0, 3]), LOGITS).argmax(-1).tolist()
    return scores


def test_the_prediction_is_the_nearest_prototype() -> None:
    assert predicted([[1], [1], [1]]) == [0, 1]


def test_a_class_without_prototype_is_never_predicted() -> None:
    assert predicted([[0], [1], [1]]) == [1, 1]


def test_without_any_prototype_the_classifier_predicts() -> None:
    assert predicted([[0], [0], [0]]) == [2, 2]


def test_an_averaged_model_predicts_with_its_classifier() -> None:
    assert predicted([[1], [1], [1]], average_model=True) == [2, 2]


# -- whole rounds ---------------------------------------------------------------------------------------------------
def test_models_stay_with_their_clients() -> None:
    """Nothing of a model travels; each client goes on from its own, which a transcription by autograd confirms."""
    federation = toy_federation({"name": "fedproto", "fedproto": {"lam": 0.5}}, lr=LR, weight_decay=0.0)
    assert set(federation.training.roles.values()) == {Role.LOCAL}
    initial = {name: value.clone() for name, value in federation.state.model.items()}
    own = dict.fromkeys(range(3), initial)
    for cohort in ((0, 1), (0, 1, 2)):
        prototypes, known = (federation.state.components["fedproto"][name] for name in ("prototypes", "known"))

        def loss(
            h: Tensor, logits: Tensor, y: Tensor, index: Tensor, p: Tensor = prototypes, k: Tensor = known
        ) -> Tensor:
            return functional.cross_entropy(logits, y) + 0.5 * (k[y] * (h - p[y]) ** 2).sum() / h.numel()

        total, expected = torch.zeros(CLASSES, 1), torch.zeros_like(prototypes)
        for client in cohort:
            data = federation.clients[client]
            own[client], epochs = descend(own[client], data, batches_of(federation, client), LR, loss)
            for c in sorted(set(data.y.tolist())):
                expected[c] += epochs[-1][0][epochs[-1][1] == c].sum(0)
                total[c] += int((data.y == c).sum())
        federation.round(cohort)
        for result in federation.results:
            assert result.contribution["fedavg/model"].tensors == {}
            assert_close(federation.client_states[result.client][MODEL], own[result.client], rtol=1e-9, atol=1e-11)
        assert_close(federation.state.components["fedproto"]["prototypes"], expected / total.clamp(min=1))
        for name, value in federation.state.model.items():
            assert torch.equal(value, initial[name])


def test_without_distance_an_averaged_model_is_fedavg_s_to_the_last_bit() -> None:
    assert_same_rounds(
        toy_federation({"name": "fedproto", "fedproto": {"lam": 0.0, "average_model": True}}),
        toy_federation("fedavg"),
    )


def test_the_first_round_of_an_averaged_model_is_fedavg_s() -> None:
    """No prototypes yet: the distance is 0."""
    ours, plain = (
        toy_federation({"name": "fedproto", "fedproto": {"average_model": True}}),
        toy_federation("fedavg"),
    )
    ours.round()
    plain.round()
    assert_close(ours.state.model, plain.state.model, rtol=1e-12, atol=1e-14)
    ours.round()
    plain.round()
    assert not torch.equal(ours.state.model["hidden.weight"], plain.state.model["hidden.weight"])


def test_a_full_pass_uses_the_trained_model() -> None:
    federation = toy_federation({"name": "fedproto", "fedproto": {"prototypes": "full-pass"}}, toy_samples(1)[2:])
    federation.round()
    data = federation.clients[0]
    h = features_of(federation.client_states[0][MODEL], data.x)
    for c in range(4):
        assert_close(federation.state.components["fedproto"]["prototypes"][c], h[data.y == c].mean(0))
    assert federation.state.components["fedproto"]["known"].squeeze().tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("prototypes", ["last-epoch", "full-pass"])
def test_clients_without_a_step_or_without_data_break_nothing(prototypes: str) -> None:
    federation = toy_federation(
        {"name": "fedproto", "fedproto": {"prototypes": prototypes}}, batch_size=64, drop_last=True
    )
    federation.clients[0] = Samples(np.zeros((0, 3)), np.zeros(0, dtype=np.int64), CLASSES)
    for _ in range(2):
        federation.round()
    assert bool(federation.state.components["fedproto"]["known"].any()) is (prototypes == "full-pass")
    assert federation.state.components["fedproto"]["prototypes"].isfinite().all()


def test_what_was_frozen_stays_frozen() -> None:
    def half_frozen() -> nn.Module:
        network = Network()
        network.hidden.requires_grad_(False)
        return network

    federation = toy_federation("fedproto", network=half_frozen)
    assert {name: role for name, role in federation.training.roles.items() if role is not Role.LOCAL} == {
        "hidden.weight": Role.FROZEN, "hidden.bias": Role.FROZEN,
    }  # fmt: skip
    federation.round()
    assert set(federation.client_states[0][MODEL]) == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    "options", [{}, {"prototypes": "full-pass", "average_model": True}], ids=["default", "full pass"]
)
def test_clients_leave_no_trace(options: dict[str, Any]) -> None:
    assert_clients_leave_no_trace({"name": "fedproto", "fedproto": options})
