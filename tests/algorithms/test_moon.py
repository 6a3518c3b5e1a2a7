"""MOON: the model-contrastive loss by hand, and whole rounds against a transcription by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms.fedavg import FedAvg
from fedfa.algorithms.moon import MOON, model_contrastive_loss
from fedfa.errors import AlgorithmError
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.context import ClientContext
from fedfa.learning.tensors import Tensors, clone
from tests.algorithms.federation_harness import Federation
from tests.algorithms.toy import (
    Normalised,
    assert_clients_leave_no_trace,
    assert_same_rounds,
    batch_of,
    batches_of,
    client_context,
    descend,
    features_of,
    toy_federation,
)

LR = 0.1


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def contrast(glob: Tensor, prev: Tensor) -> Tensor:
    return functional.normalize(prev, dim=-1) - functional.normalize(glob, dim=-1)


# -- the loss by hand -----------------------------------------------------------------------------------------------
GLOB, PREV, Z = numbers([2, 0], [3, 0]), numbers([0, 5], [-1, 0]), numbers([3, 4], [7, 0])
"""First sample: cosines 0.6 with the global model's features, 0.8 with the previous ones; second: 1 and −1."""


def test_the_loss_of_each_sample_by_hand() -> None:
    """τ = ½: log(1 + e^((0.8 − 0.6)/½)) = log(1 + e^0.4), and log(1 + e^((−1 − 1)/½)) = log(1 + e^(−4))."""
    each = model_contrastive_loss(Z, contrast(GLOB, PREV), tau=0.5)
    assert_close(each, numbers(log(1 + exp(0.4)), log(1 + exp(-4))))


def test_it_is_the_formula_of_the_paper() -> None:
    """The negative log of the softmax of the two cosines over τ, at the global model."""
    generator = torch.Generator().manual_seed(1)
    z, glob, prev = (torch.randn(9, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    cosines = torch.stack([functional.cosine_similarity(z, other) for other in (glob, prev)], dim=-1)
    expected = -(cosines / 0.7).log_softmax(-1)[:, 0]
    assert_close(model_contrastive_loss(z, contrast(glob, prev), tau=0.7), expected)


def test_the_gradient_by_hand() -> None:
    """z = (3, 4) has length 5 and direction (0.6, 0.8); Δ = (0, 1) − (1, 0) = (−1, 1), direction·Δ = 0.2.

    ∂ℓ/∂z = σ(0.4)/τ · (Δ − 0.2·direction)/5 = 2 σ(0.4) · (−1.12, 0.84)/5. Minimising moves z to the global (1, 0).
    """
    z = Z[:1].clone().requires_grad_()
    model_contrastive_loss(z, contrast(GLOB[:1], PREV[:1]), tau=0.5).sum().backward()
    sigma = 1 / (1 + exp(-0.4))
    assert_close(z.grad, numbers([2 * sigma * -0.224, 2 * sigma * 0.168]))


def test_the_component_adds_mu_times_the_mean() -> None:
    component = MOON(mu=3.0, tau=0.5)
    ctx = client_context(torch.zeros(2, 2, dtype=torch.float64), [1, 1])
    ctx.scratch["moon"] = {"contrast": contrast(GLOB, PREV)}
    found = component.loss(ctx, batch_of(Z, [0, 1]), numbers(10).squeeze())
    assert_close(found, numbers(10 + 3 * (log(1 + exp(0.4)) + log(1 + exp(-4))) / 2).squeeze())


def test_batches_find_their_own_samples_features() -> None:
    """A batch with the second sample only, at position 1 of the client's data."""
    component = MOON(mu=1.0, tau=0.5)
    ctx = client_context(torch.zeros(2, 2, dtype=torch.float64), [1, 1])
    ctx.scratch["moon"] = {"contrast": contrast(GLOB, PREV)}
    batch = batch_of(Z[1:], [1])
    batch.index = torch.tensor([1])
    assert_close(component.loss(ctx, batch, numbers(0).squeeze()), numbers(log(1 + exp(-4))).squeeze())


def test_it_is_not_the_ratio_of_batch_means() -> None:
    """Cosines (1, −1) and (−1, 1): the means are both 0, so the ratio of means gives log 2 ≈ 0.69 and no pull at all.

    Per sample: (log(1 + e^(−4)) + log(1 + e^4))/2 = 2 + log(1 + e^(−4)) ≈ 2.02.
    """
    z, glob, prev = numbers([1, 0], [1, 0]), numbers([1, 0], [-1, 0]), numbers([-1, 0], [1, 0])
    found = model_contrastive_loss(z, contrast(glob, prev), tau=0.5).mean()
    assert_close(found, numbers(2 + log(1 + exp(-4))).squeeze())
    of_means = [functional.cosine_similarity(z, other).mean() for other in (glob, prev)]
    assert_close(-(torch.stack(of_means) / 0.5).log_softmax(-1)[0], numbers(log(2)).squeeze())


def test_features_of_length_zero_do_no_harm() -> None:
    z = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    loss = model_contrastive_loss(z, contrast(GLOB[:1], PREV[:1]), tau=0.5).sum()
    loss.backward()
    assert_close(loss.detach(), numbers(log(2)).squeeze())
    assert z.grad is not None
    assert z.grad.isfinite().all()


# -- whole rounds ---------------------------------------------------------------------------------------------------
def transcribed_round(federation: Federation, client: int, previous: Tensors, mu: float, tau: float) -> Tensors:
    """A client's round as the paper describes it: every feature recomputed at every step."""
    start, data = clone(federation.state.model), federation.clients[client]

    def loss(h: Tensor, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        others = [features_of(weights, data.x[index]) for weights in (start, previous)]
        cosines = torch.stack([functional.cosine_similarity(h, other) for other in others], dim=-1)
        return functional.cross_entropy(logits, y) - mu * (cosines / tau).log_softmax(-1)[:, 0].mean()

    return descend(start, data, batches_of(federation, client), LR, loss)[0]


def moon(mu: float = 2.0, tau: float = 0.5, **local: Any) -> Federation:
    return toy_federation({"name": "moon", "moon": {"mu": mu, "tau": tau}}, lr=LR, weight_decay=0.0, **local)


COHORTS: Sequence[tuple[int, ...]] = ((0, 1, 2), (1,), (0, 1), (2,))
"""Client 0 skips a round and client 2 two: their previous model is the one of their own last round."""


def test_rounds_are_the_paper_s_with_each_client_s_own_previous_model() -> None:
    federation = moon()
    own: dict[int, Tensors] = {}
    for cohort in COHORTS:
        expected = {
            c: transcribed_round(federation, c, own.get(c, federation.state.model), mu=2.0, tau=0.5) for c in cohort
        }
        start = federation.state.model
        federation.round(cohort)
        for result in federation.results:
            sums = result.contribution["fedavg/model"]
            for name, value in expected[result.client].items():
                assert_close(sums.tensors[name] / sums.weight, value - start[name], rtol=1e-9, atol=1e-11)
        own |= expected


def test_the_client_state_is_the_trained_model() -> None:
    federation = moon()
    start = federation.state.model
    federation.round()
    for result in federation.results:
        sums = result.contribution["fedavg/model"]
        for name, value in federation.client_states[result.client]["moon"].items():
            assert_close(value, start[name] + sums.tensors[name] / sums.weight, rtol=1e-12, atol=1e-14)


def test_the_first_round_is_fedavg_s_and_reports_log_two_more() -> None:
    """Previous = global: ℓ_con = log 2 for every sample, and its gradient is zero."""
    ours, plain = moon(mu=3.0), toy_federation("fedavg", lr=LR, weight_decay=0.0)
    ours.round()
    plain.round()
    for mine, other in zip(ours.results, plain.results, strict=True):
        assert mine.loss is not None
        assert other.loss is not None
        assert mine.loss == pytest.approx(other.loss + 3 * log(2), abs=1e-12)
    for name, value in plain.state.model.items():
        assert torch.equal(ours.state.model[name], value), name


def test_the_fixed_features_are_computed_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes per client and round however many epochs and batches there are; none in a client's first round."""
    calls: list[int] = []
    original = ClientContext.features

    def counted(self: ClientContext, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(self.client)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ClientContext, "features", counted)
    federation = moon()
    federation.round()
    assert calls == []
    federation.round([0, 2])
    assert calls == [0, 0, 2, 2]


def test_mu_zero_is_fedavg_to_the_last_bit_and_stores_no_client_state() -> None:
    federation = moon(mu=0.0)
    assert_same_rounds(federation, toy_federation("fedavg", lr=LR, weight_decay=0.0))
    assert not any(client_state.get("moon") for client_state in federation.client_states.values())


def test_a_client_without_a_step_keeps_the_model_it_got() -> None:
    federation = moon(batch_size=64, drop_last=True)
    for _ in range(2):
        start = federation.state.model
        federation.round()
        for name, value in federation.client_states[0]["moon"].items():
            assert torch.equal(value, start[name])


def test_one_client_alone_works() -> None:
    """FedAvg one model changes nothing: its previous model is the global one, so every round is FedAvg's."""
    ours, plain = moon(), toy_federation("fedavg", lr=LR, weight_decay=0.0)
    for _ in range(3):
        ours.round([1])
        plain.round([1])
    for name, value in plain.state.model.items():
        assert_close(ours.state.model[name], value, rtol=1e-9, atol=1e-11)


def test_clients_leave_no_trace() -> None:
    assert_clients_leave_no_trace("moon")


def test_the_fixed_features_are_those_of_evaluation() -> None:
    """With BatchNorm: each fixed model uses the statistics it came with, and the training network keeps its own."""
    federation = toy_federation("moon", network=Normalised, batch_size=8)
    federation.round()
    found: list[Tensor] = []

    class Spy(MOON):
        name = "moon"

        def begin(self, ctx: ClientContext) -> None:
            before = clone(ctx.model.state())
            super().begin(ctx)
            found.append(ctx.scratch[self.name]["contrast"])
            assert ctx.model.module.training
            assert all(torch.equal(value, before[name]) for name, value in ctx.model.state().items())

    federation.trainer.algorithm = Algorithm([FedAvg(), Spy()])
    previous, data = clone(federation.client_states[2]["moon"]), federation.clients[2]
    federation.train(2)

    def features(weights: Tensors) -> Tensor:
        x = data.x @ weights["hidden.weight"].T + weights["hidden.bias"]
        scale = (weights["norm.running_var"] + 1e-5).sqrt()
        return ((x - weights["norm.running_mean"]) / scale * weights["norm.weight"] + weights["norm.bias"]).relu()

    assert not torch.equal(previous["norm.running_mean"], federation.state.model["norm.running_mean"])
    assert_close(found[0], contrast(features(federation.state.model), features(previous)))


def test_without_a_global_model_it_is_refused() -> None:
    with pytest.raises(AlgorithmError, match="acts on a model that clients share"):
        toy_federation("fedproto+moon")
    toy_federation({"name": "fedproto+moon", "fedproto": {"average_model": True}}).round()
