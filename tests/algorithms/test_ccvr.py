"""CCVR: the clients' sums, the Gaussians made of them, the virtual features, and the classifier trained on these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import ccvr
from fedfa.algorithms.ccvr import CCVR, factor, shared_out, train_classifier
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ClientError
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.learning.aggregate import Aggregate, contribution_nbytes
from fedfa.learning.algorithm import Algorithm
from fedfa.learning.component import Component, Traits
from fedfa.learning.context import LocalTraining, ServerStep
from fedfa.learning.random import torch_stream
from tests.algorithms.federation_harness import Federation, Samples
from tests.experiment.run_toys import equal_tensors, small

C, D = 3, 4
Cloud = tuple[np.ndarray, np.ndarray]
"""Features and labels of one client."""


def clouds(sizes: Sequence[Sequence[int]], seed: int = 0, offset: float = 0.0) -> list[Cloud]:
    """Correlated features around one centre per class; ``sizes[k][c]`` samples of class c for client k, each client
    with a shift of its own. Single precision, as features are."""
    rng = np.random.default_rng(seed)
    mixing, centres = rng.normal(size=(C, D, D)), 3 * rng.normal(size=(C, D)) + offset
    found = []
    for counts in sizes:
        y = np.repeat(np.arange(C), counts)
        noise = np.einsum("nd,nde->ne", rng.normal(size=(len(y), D)), mixing[y])
        found.append(((centres[y] + noise + 0.5 * rng.normal(size=D)).astype(np.float32), y))
    return found


def pooled(data: Sequence[Cloud]) -> Cloud:
    return np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data])


class FinalPass(Federation):
    """The final pass of a network that is only its classifier, so that its features are its inputs."""

    def __init__(
        self,
        data: Sequence[Cloud],
        *,
        bias: bool = True,
        seed: int = 1,
        before: Sequence[Component] = (),
        **options: Any,
    ) -> None:
        with torch_stream(0, "classifier"):
            network = nn.Sequential(nn.Linear(D, C, bias=bias))
        self.component = CCVR(**options)
        clients = [Samples(x, y, C, torch.float32) for x, y in data]
        super().__init__(Algorithm([*before, self.component]), network, clients, LocalTraining(), seed=seed, rounds=3)
        self.start = self.state = replace(self.state, round=3)
        self.total = Aggregate()
        self.contributions = [self.train(client, final_pass=True).contribution for client in range(len(data))]
        for contribution in self.contributions:
            self.total.add(contribution)

    def covariance(self, c: int) -> np.ndarray:
        """Σ_c as the virtual features will have it."""
        moments, counts = self.total.mean("ccvr/moments"), self.total["ccvr/moments"].weight[:, 0]
        spread = factor(moments["second"][c], moments["first"][c], counts[c], self.component.covariance)
        found: np.ndarray = (spread @ spread.mT if spread.dim() == 2 else spread.square().diag()).numpy()
        return found

    def mean(self, c: int) -> np.ndarray:
        found: np.ndarray = self.total.mean("ccvr/moments")["first"][c].numpy()
        return found

    def virtual(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
        """The virtual features the classifier is trained on, and their labels."""
        seen: list[tuple[Tensor, Tensor]] = []

        def watched(features: Tensor, labels: Tensor, start: list[Tensor], *_: Any) -> list[Tensor]:
            seen.append((features, labels))
            return start

        monkeypatch.setattr(ccvr, "train_classifier", watched)
        self.round(final_pass=True)
        return seen[0]


SIZES = [[7, 5, 0], [1, 9, 2], [0, 2, 30]]
"""Clients that lack a class, hold a single sample of one, and differ in size."""


# -- the Gaussians ----------------------------------------------------------------------------------------------------
def test_mean_and_covariance_are_those_of_all_features_together() -> None:
    data = clouds(SIZES)
    final_pass, (x, y) = FinalPass(data), pooled(data)
    assert final_pass.total["ccvr/moments"].weight[:, 0].tolist() == np.bincount(y).tolist()
    for c in range(C):
        features = x[y == c].astype(np.float64)
        assert_allclose(final_pass.mean(c), features.mean(0), rtol=1e-12)
        assert_allclose(final_pass.covariance(c), np.cov(features, rowvar=False, ddof=1), rtol=1e-11, atol=1e-11)


def test_they_are_what_the_paper_pools() -> None:
    """The paper's two formulas, from each client's own mean and covariance (divisor N_ck − 1)."""
    data = clouds([[7, 5, 4], [3, 9, 2], [6, 2, 30]], seed=3)
    final_pass = FinalPass(data)
    for c in range(C):
        own = [x[y == c].astype(np.float64) for x, y in data]
        n = np.array([len(h) for h in own])
        means = [h.mean(0) for h in own]
        total = n.sum()
        mean = sum(n_k / total * m for n_k, m in zip(n, means, strict=True))
        covariance = (
            sum((n_k - 1) / (total - 1) * np.cov(h, rowvar=False) for n_k, h in zip(n, own, strict=True))
            + sum(n_k / (total - 1) * np.outer(m, m) for n_k, m in zip(n, means, strict=True))
            - total / (total - 1) * np.outer(mean, mean)
        )
        assert_allclose(final_pass.mean(c), mean, rtol=1e-12)
        assert_allclose(final_pass.covariance(c), covariance, rtol=1e-11, atol=1e-11)


def test_how_the_samples_are_spread_over_clients_does_not_matter() -> None:
    data = clouds(SIZES)
    x, y = pooled(data)
    order = np.random.default_rng(5).permutation(len(y))
    alone = FinalPass([(x, y)])
    other = FinalPass([(x[component], y[component]) for component in np.array_split(order, 5)])
    for c in range(C):
        assert_allclose(other.mean(c), alone.mean(c), rtol=1e-13)
        assert_allclose(other.covariance(c), alone.covariance(c), rtol=1e-11, atol=1e-12)


def test_a_large_mean_does_not_drown_the_covariance() -> None:
    """Means of 10,000 and a spread of about one: E[h²] − E[h]² cancels eight digits. Double precision has them."""
    data = clouds([[400, 300, 200], [100, 250, 300]], offset=1e4)
    final_pass, (x, y) = FinalPass(data), pooled(data)
    for c in range(C):
        exact = np.cov(x[y == c].astype(np.float64), rowvar=False)
        assert_allclose(final_pass.covariance(c), exact, atol=1e-6 * np.abs(exact).max())
        features = x[y == c]  # the same in single precision is nowhere near
        single = (features.T @ features - len(features) * np.outer(features.mean(0), features.mean(0))) / len(features)
        assert np.abs(single - exact).max() > 0.1 * np.abs(exact).max()


def test_what_a_client_sends_is_sums_in_double_precision() -> None:
    final_pass = FinalPass(clouds(SIZES))
    for sums, client in zip(final_pass.contributions, final_pass.clients, strict=True):
        assert sums.keys() == {"ccvr/moments"}
        entry = sums["ccvr/moments"]
        assert entry.weight[:, 0].tolist() == client.label_counts.tolist()
        assert all(value.dtype == torch.float64 for value in entry.tensors.values())
        assert contribution_nbytes(sums) == 8 * (C + C * D + C * D * (D + 1) // 2)
    few = FinalPass(clouds(SIZES), covariance="diagonal").contributions[0]
    assert contribution_nbytes(few) == 8 * (C + 2 * C * D)


def test_a_definite_covariance_is_factored_as_it_is() -> None:
    """Without anything added: the factor is torch's own, bit for bit."""
    data = clouds([[40, 40, 40]])
    final_pass = FinalPass(data)
    moments = final_pass.total.mean("ccvr/moments")
    rows, columns = torch.triu_indices(D, D)
    second = torch.zeros(D, D, dtype=torch.float64)
    second[rows, columns] = moments["second"][0]
    second[columns, rows] = moments["second"][0]
    mean = moments["first"][0]
    expected = torch.linalg.cholesky((second - torch.outer(mean, mean)) * (torch.tensor(40.0).double() / 39))
    assert torch.equal(factor(moments["second"][0], mean, torch.tensor(40.0).double(), "full"), expected)


@pytest.mark.parametrize("kind", ["a feature that is always zero", "fewer samples than dimensions", "copied features"])
def test_a_singular_covariance_gets_no_more_than_it_needs(kind: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3 if kind.startswith("fewer") else 50, D)).astype(np.float32)
    if kind.startswith("a feature"):
        x[:, 1] = 0
    elif kind.startswith("copied"):
        x[:, 2] = x[:, 0]
    final_pass = FinalPass([(x, np.zeros(len(x), dtype=np.int64))])
    exact = np.cov(x.astype(np.float64), rowvar=False)
    assert np.linalg.matrix_rank(exact) < D
    assert_allclose(final_pass.covariance(0), exact, atol=1e-7 * np.trace(exact))


def test_a_matrix_that_is_no_covariance_still_has_a_factor() -> None:
    """As sums with noise on them may give: an eigenvalue far below zero. The diagonal grows until it is gone."""
    matrix = torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)  # eigenvalues 4 and −2
    packed = matrix[tuple(torch.triu_indices(2, 2))]
    lower = factor(packed, torch.zeros(2).double(), torch.tensor(1e12).double(), "full")
    assert torch.isfinite(lower).all()
    added = (lower @ lower.mT - matrix).diagonal()
    assert 2 < added[0] <= 20, "more than the eigenvalue, at most ten times as much"
    assert_close(lower @ lower.mT - added.diag(), matrix, rtol=1e-6, atol=1e-6)


def test_a_class_of_one_sample_has_no_spread_and_one_without_samples_no_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = clouds([[1, 6, 0], [0, 5, 0]])
    features, labels = FinalPass(data, samples=10, share="equal").virtual(monkeypatch)
    assert torch.bincount(labels, minlength=C).tolist() == [10, 10, 0]
    assert_close(features[labels == 0], torch.from_numpy(data[0][0][:1]).expand(10, D))
    assert features[labels == 1].std(0).min() > 0.1


# -- the virtual features ---------------------------------------------------------------------------------------------
def test_virtual_features_have_the_mean_and_the_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40,000 draws: the mean within five standard errors, the covariance within five of a variance's."""
    data = clouds([[30, 20, 10], [5, 40, 50]])
    final_pass = FinalPass(data, samples=40_000, share="equal")
    features, labels = final_pass.virtual(monkeypatch)
    assert features.dtype == torch.float32
    for c in range(C):
        drawn, covariance = features[labels == c].double().numpy(), final_pass.covariance(c)
        deviation = np.sqrt(np.diag(covariance))
        assert np.all(np.abs(drawn.mean(0) - final_pass.mean(c)) < 5 * deviation / 200)
        difference = np.cov(drawn, rowvar=False) - covariance
        assert np.all(np.abs(difference) < 5 * np.sqrt(2) * np.outer(deviation, deviation) / 200)


def test_a_diagonal_covariance_keeps_variances_and_drops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clouds([[300, 200, 100]])
    x, y = data[0]
    final_pass = FinalPass(data, covariance="diagonal", samples=40_000, share="equal")
    features, labels = final_pass.virtual(monkeypatch)
    for c in range(C):
        exact = np.cov(x[y == c].astype(np.float64), rowvar=False)
        assert np.abs(np.corrcoef(x[y == c], rowvar=False) - np.eye(D)).max() > 0.3, "else the test shows nothing"
        assert_allclose(np.diag(final_pass.covariance(c)), np.diag(exact), rtol=1e-10)
        drawn = features[labels == c].double().numpy()
        assert_allclose(np.diag(np.cov(drawn, rowvar=False)), np.diag(exact), rtol=0.05)
        assert np.abs(np.corrcoef(drawn, rowvar=False) - np.eye(D)).max() < 0.03


def test_virtual_features_are_shared_out() -> None:
    assert shared_out(torch.tensor([30.0, 10.0, 0.0, 20.0]), 100, "samples") == [150, 50, 0, 100]
    assert shared_out(torch.tensor([30.0, 10.0, 0.0, 20.0]), 100, "equal") == [100, 100, 0, 100]
    assert shared_out(torch.tensor([1e6, 1.0]), 5, "samples") == [10, 1], "a class with samples has at least one"


def test_relu_sets_negative_values_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = FinalPass(clouds(SIZES)).virtual(monkeypatch)
    cut, _ = FinalPass(clouds(SIZES), relu=True).virtual(monkeypatch)
    assert plain.min() < 0
    assert torch.equal(cut, plain.clamp(min=0))


def test_tukeys_power_is_undone_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features whose square root is normal, far from zero: virtual features have a normal square root as well."""
    rng = np.random.default_rng(4)
    root = 5 + 0.7 * rng.normal(size=(3000, D))
    x, y = (root**2).astype(np.float32), np.zeros(3000, dtype=np.int64)
    final_pass = FinalPass([(x, y)], power=0.5, samples=20_000)
    assert_allclose(final_pass.mean(0), np.sqrt(x.astype(np.float64)).mean(0), rtol=1e-12)
    features, _ = final_pass.virtual(monkeypatch)
    assert_allclose(features.mean(0), x.mean(0), rtol=0.02)
    assert_allclose(features.sqrt().std(0), root.std(0), rtol=0.05)
    skew = ((features - features.mean(0)) / features.std(0)).pow(3).mean(0)
    assert skew.min() > 0.25, "the skewness of the features is kept"


def test_tukeys_power_of_negative_features_is_refused() -> None:
    with pytest.raises(ClientError, match="power takes roots, but this network has negative features"):
        FinalPass(clouds(SIZES), power=0.5)


# -- the classifier ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_the_classifier_is_trained_as_torch_would(bias: bool, schedule: str) -> None:
    rng = np.random.default_rng(1)
    features, labels = torch.from_numpy(rng.normal(size=(50, D))), torch.from_numpy(rng.integers(C, size=50))
    options = CCVR(epochs=3, batch_size=8, lr=0.1, momentum=0.9, weight_decay=0.01, schedule=schedule)
    with torch_stream(0, "head"):
        head = nn.Linear(D, C, bias=bias).double()
    start = [parameter.detach().clone() for parameter in head.parameters()]
    found = train_classifier(features, labels, start, options, np.random.default_rng(7))

    optimiser = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    order, step = np.random.default_rng(7), 0
    for _ in range(3):
        for batch in torch.split(torch.from_numpy(order.permutation(50)), 8):
            optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / 21 if schedule == "linear" else 1)
            optimiser.zero_grad()
            functional.cross_entropy(head(features[batch]), labels[batch]).backward()
            optimiser.step()
            step += 1
    assert step == 21
    for mine, theirs, before in zip(found, head.parameters(), start, strict=True):
        assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-12)
        assert not torch.equal(mine, before)


@pytest.mark.parametrize("bias", [True, False])
def test_a_random_classifier_becomes_a_good_one(bias: bool) -> None:
    """Three clouds that a linear classifier can tell apart: nearly every real sample is then right."""
    rng = np.random.default_rng(8)
    y = np.repeat(np.arange(C), 60)
    x = (4 * np.eye(C, D)[y] + rng.normal(size=(180, D)) @ np.diag([1, 0.5, 0.5, 2])).astype(np.float32)
    data = [(x[y == c], y[y == c]) for c in range(C)]  # one class per client
    final_pass = FinalPass(data, bias=bias, samples=500)
    after = final_pass.round(final_pass=True)
    weight, offset = after.model["0.weight"], after.model.get("0.bias", torch.zeros(C))

    def accuracy(weight: Tensor, offset: Tensor) -> float:
        return float((functional.linear(torch.from_numpy(x), weight, offset).argmax(1).numpy() == y).mean())

    before = final_pass.start.model
    assert accuracy(before["0.weight"], before.get("0.bias", torch.zeros(C))) < 0.7
    assert accuracy(weight, offset) > 0.95
    assert after.round == final_pass.start.round == 3


def test_it_goes_on_from_the_final_step_of_earlier_components() -> None:
    class Shift(Component):
        traits = Traits(final_pass=True)

        def step(self, server: ServerStep) -> None:
            server.update["0.bias"] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    final_pass = FinalPass(clouds(SIZES), before=[Shift()], lr=1e-12, samples=5, epochs=1)
    after = final_pass.round(final_pass=True).model
    assert_close(after["0.bias"], final_pass.start.model["0.bias"] + torch.tensor([1.0, 2.0, 3.0]))
    assert_close(after["0.weight"], final_pass.start.model["0.weight"])


def test_draws_follow_the_seed() -> None:
    data = clouds(SIZES)
    models = [FinalPass(data, seed=seed, samples=100).round(final_pass=True).model for seed in (1, 1, 2)]
    assert equal_tensors(models[0], models[1])
    assert not torch.equal(models[0]["0.weight"], models[2]["0.weight"])


def test_a_training_that_diverges_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"diverged: lower algorithm\.ccvr\.lr \(now 1e\+308\)"):
        FinalPass(clouds(SIZES), lr=1e308).round(final_pass=True)


# -- whole runs -------------------------------------------------------------------------------------------------------
FEW = {"ccvr": {"samples": 200}}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "scaffold", "fedavg+fedadam", "centralised", "fedprox"])
def test_only_the_classifier_differs_from_the_run_without(tmp_path: Path, blobs: DataSet, algorithm: str) -> None:
    without = run(small(algorithm, rounds=2), tmp_path / "without", data=blobs)
    result = run(small(f"{algorithm}+ccvr", rounds=2, algorithm=FEW), tmp_path / "with", data=blobs)
    for name, value in without.model.items():
        assert torch.equal(value, result.model[name]) == (not name.startswith("head")), name
    assert [r["accuracy"] for r in result.metrics[:-1]] == [r["accuracy"] for r in without.metrics]
    assert result.summary["accuracy_before_final_pass"] == without.final_accuracy
    assert result.final_accuracy > 0.7


def test_alone_it_follows_fedavg(tmp_path: Path, blobs: DataSet) -> None:
    alone, named = (
        run(small(text, rounds=2, algorithm=FEW), tmp_path / text, data=blobs) for text in ("ccvr", "fedavg+ccvr")
    )
    assert equal_tensors(alone.model, named.model)


def test_it_mends_the_classifier_of_skewed_clients(tmp_path: Path, blobs: DataSet) -> None:
    """Two classes per client, one round: FedAvg's classifier is far off, its features are not."""
    result = run(small("ccvr", rounds=1), tmp_path / "run", data=blobs)
    assert result.summary["accuracy_before_final_pass"] < 0.6
    assert result.final_accuracy > 0.8


def test_batch_norm_networks_and_networks_without_bias(tmp_path: Path, blobs: DataSet) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4, bias=False))

    result = run(small("ccvr", rounds=2, algorithm=FEW), tmp_path / "run", data=blobs, model=network)
    without = run(small("fedavg", rounds=2), tmp_path / "without", data=blobs, model=network)
    changed = {name for name in result.model if not torch.equal(result.model[name], without.model[name])}
    assert changed == {"3.weight"}


# -- what it does not go with -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("algorithm", ["local+ccvr", "fedproto+ccvr"])
def test_without_a_global_model_it_is_refused(blobs: DataSet, algorithm: str) -> None:
    with pytest.raises(
        AlgorithmError, match=r"'ccvr' trains the classifier of one global model, but here each client keeps 4 tensors"
    ):
        Experiment.from_config(small(algorithm), data=blobs)


def test_with_normalisation_layers_of_each_client_it_is_refused(blobs: DataSet) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    with pytest.raises(AlgorithmError, match=r"each client keeps 5 tensors \('1.weight' …\)"):
        Experiment.from_config(small("fedbn+ccvr"), data=blobs, model=network)
    with pytest.raises(AlgorithmError, match=r'model\.buffers, set it to "average"'):
        Experiment.from_config(small("ccvr", model={"buffers": "local"}), data=blobs, model=network)


def test_with_a_fixed_classifier_it_is_refused(blobs: DataSet) -> None:
    with pytest.raises(AlgorithmError, match="fixed frame"):
        Experiment.from_config(small("fedetf+ccvr"), data=blobs)

    def frozen() -> nn.Module:
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        network[2].weight.requires_grad_(False)
        return network

    with pytest.raises(AlgorithmError, match=r"'2\.weight' is frozen; leave out 'ccvr'"):
        Experiment.from_config(small("ccvr"), data=blobs, model=frozen)


def test_with_a_classifier_tied_to_another_layer_it_is_refused(blobs: DataSet) -> None:
    """Its weight is the other layer's as well: the features would change with it."""
    square = replace(blobs, classes=tuple("abcdef"))

    def tied() -> nn.Module:
        network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        network[2].weight = network[0].weight
        return network

    with pytest.raises(AlgorithmError, match=r"'2\.weight' is tied to another layer"):
        Experiment.from_config(small("ccvr"), data=square, model=tied)
