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

from fedfa.algorithms.fedavg import Averaging
from fedfa.algorithms.moon import ModelContrast, ModelContrastOptions, model_contrastive_loss
from fedfa.errors import RecipeError
from fedfa.learning.part import ClientContext
from fedfa.learning.recipe import Recipe
from fedfa.learning.tensors import Tensors, clone
from tests.algorithms.keeping import Normalised, Study, clients_leave_no_trace, descend, features_of, same_bits
from tests.algorithms.toy import batch_of, client_context

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


def test_the_part_adds_mu_times_the_mean() -> None:
    part = ModelContrast(ModelContrastOptions(mu=3.0, tau=0.5))
    ctx = client_context(torch.zeros(2, 2, dtype=torch.float64), [1, 1])
    ctx.scratch["moon"] = {"contrast": contrast(GLOB, PREV)}
    found = part.loss(ctx, batch_of(Z, [0, 1]), numbers(10).squeeze())
    assert_close(found, numbers(10 + 3 * (log(1 + exp(0.4)) + log(1 + exp(-4))) / 2).squeeze())


def test_batches_find_their_own_samples_features() -> None:
    """A batch with the second sample only, at position 1 of the client's data."""
    part = ModelContrast(ModelContrastOptions(mu=1.0, tau=0.5))
    ctx = client_context(torch.zeros(2, 2, dtype=torch.float64), [1, 1])
    ctx.scratch["moon"] = {"contrast": contrast(GLOB, PREV)}
    batch = batch_of(Z[1:], [1])
    batch.index = torch.tensor([1])
    assert_close(part.loss(ctx, batch, numbers(0).squeeze()), numbers(log(1 + exp(-4))).squeeze())


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
def transcribed_round(study: Study, client: int, previous: Tensors, mu: float, tau: float) -> Tensors:
    """A client's round in the words of the paper: every feature recomputed at every step."""
    start, data = clone(study.state.model), study.clients[client]

    def loss(h: Tensor, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        others = [features_of(weights, data.x[index]) for weights in (start, previous)]
        cosines = torch.stack([functional.cosine_similarity(h, other) for other in others], dim=-1)
        return functional.cross_entropy(logits, y) - mu * (cosines / tau).log_softmax(-1)[:, 0].mean()

    return descend(start, data, study.batches(client), LR, loss)[0]


def moon(mu: float = 2.0, tau: float = 0.5, **local: Any) -> Study:
    return Study({"recipe": "moon", "moon": {"mu": mu, "tau": tau}}, lr=LR, weight_decay=0.0, **local)


COHORTS: Sequence[tuple[int, ...]] = ((0, 1, 2), (1,), (0, 1), (2,))
"""Client 0 skips a round and client 2 two: their previous model is the one of their own last round."""


def test_rounds_are_the_paper_s_with_each_client_s_own_previous_model() -> None:
    study = moon()
    own: dict[int, Tensors] = {}
    for cohort in COHORTS:
        expected = {c: transcribed_round(study, c, own.get(c, study.state.model), mu=2.0, tau=0.5) for c in cohort}
        start = study.state.model
        results = study.play(cohort)
        for result in results:
            sums = result.sums["fedavg/model"]
            for name, value in expected[result.client].items():
                assert_close(sums.tensors[name] / sums.weight, value - start[name], rtol=1e-9, atol=1e-11)
        own |= expected


def test_what_a_client_keeps_is_its_trained_model() -> None:
    study = moon()
    start = study.state.model
    for result in study.play():
        sums = result.sums["fedavg/model"]
        for name, value in study.kept[result.client]["moon"].items():
            assert_close(value, start[name] + sums.tensors[name] / sums.weight, rtol=1e-12, atol=1e-14)


def test_the_first_round_is_fedavg_s_and_reports_log_two_more() -> None:
    """Previous = global: ℓ_con = log 2 for every sample, and its gradient is zero."""
    ours, plain = moon(mu=3.0), Study({"recipe": "fedavg"}, lr=LR, weight_decay=0.0)
    for mine, other in zip(ours.play(), plain.play(), strict=True):
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
    study = moon()
    study.play()
    assert calls == []
    study.play([0, 2])
    assert calls == [0, 0, 2, 2]


def test_mu_zero_is_fedavg_to_the_last_bit_and_keeps_nothing() -> None:
    study = moon(mu=0.0)
    same_bits(study, Study({"recipe": "fedavg"}, lr=LR, weight_decay=0.0))
    assert not any(kept.get("moon") for kept in study.kept.values())


def test_a_client_without_a_step_keeps_the_model_it_got() -> None:
    study = moon(batch_size=64, drop_last=True)
    for _ in range(2):
        start = study.state.model
        study.play()
        for name, value in study.kept[0]["moon"].items():
            assert torch.equal(value, start[name])


def test_one_client_alone_works() -> None:
    """Averaging one model changes nothing: its previous model is the global one, so every round is FedAvg's."""
    ours, plain = moon(), Study({"recipe": "fedavg"}, lr=LR, weight_decay=0.0)
    for _ in range(3):
        ours.play([1])
        plain.play([1])
    for name, value in plain.state.model.items():
        assert_close(ours.state.model[name], value, rtol=1e-9, atol=1e-11)


def test_clients_leave_no_trace() -> None:
    clients_leave_no_trace({"recipe": "moon"})


def test_the_fixed_features_are_those_of_evaluation() -> None:
    """With BatchNorm: each fixed model uses the statistics it came with, and the training network keeps its own."""
    study = Study({"recipe": "moon"}, network=Normalised, batch_size=8)
    study.play()
    found: list[Tensor] = []

    class Spy(ModelContrast):
        def begin(self, ctx: ClientContext) -> None:
            before = clone(ctx.model.state())
            super().begin(ctx)
            found.append(ctx.scratch[self.name]["contrast"])
            assert ctx.model.module.training
            assert all(torch.equal(value, before[name]) for name, value in ctx.model.state().items())

    study.trainer.recipe = Recipe([Averaging(), Spy()])
    previous, data = clone(study.kept[2]["moon"]), study.clients[2]
    study.train(2)

    def features(weights: Tensors) -> Tensor:
        x = data.x @ weights["hidden.weight"].T + weights["hidden.bias"]
        scale = (weights["norm.running_var"] + 1e-5).sqrt()
        return ((x - weights["norm.running_mean"]) / scale * weights["norm.weight"] + weights["norm.bias"]).relu()

    assert not torch.equal(previous["norm.running_mean"], study.state.model["norm.running_mean"])
    assert_close(found[0], contrast(features(study.state.model), features(previous)))


def test_without_a_global_model_it_is_refused() -> None:
    with pytest.raises(RecipeError, match="acts on a model that clients share"):
        Study({"recipe": "fedproto+moon"})
    Study({"recipe": "fedproto+moon", "fedproto": {"average_model": True}}).play()
