"""FedNH: the classifier's geometry, what clients may move, and the renewal of prototypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import FedNH
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError
from tests.algorithms.toy import CLASSES, HELD, INPUTS, features_of, toy_federation, toy_samples

W = "classifier.prototypes.weight"


def test_prototypes_start_as_a_simplex() -> None:
    """Unit vectors, every pair with cosine −1/(C − 1)."""
    start = toy_federation(FedNH()).state.model[W]
    cosines = start @ start.T
    expected = torch.full((CLASSES, CLASSES), -0.25, dtype=torch.float64)
    assert_close(cosines, expected.fill_diagonal_(1.0), rtol=0, atol=1e-6)


def test_logits_are_scaled_cosines_and_clients_train_all_but_the_prototypes() -> None:
    federation = toy_federation(FedNH(scale=3.0))
    start, x = federation.state.model, federation.clients[0].x
    _, logits = federation.model(x)
    assert_close(logits.detach(), 3 * functional.normalize(features_of(start, x), dim=1) @ start[W].T)
    update = federation.train(0).contribution["fedavg/model"].tensors
    assert not update[W].any()
    assert all(update[name].any() for name in ("hidden.weight", "hidden.bias", "classifier.scale"))


def test_the_renewal_of_prototypes_written_out() -> None:
    """Two rounds: μ_kc is the direction of the mean unit feature under the client's own trained model."""
    rho = 0.6
    federation = toy_federation(FedNH(rho=rho))
    for _ in range(2):
        before = federation.state.model
        sums = torch.zeros_like(before[W])
        for client, data in enumerate(federation.clients):
            update = federation.train(client).contribution["fedavg/model"]
            own = {name: before[name] + update.tensors[name] / update.weight for name in before}
            unit = functional.normalize(features_of(own, data.x), dim=1)
            for c in HELD[client]:
                mine = unit[data.y == c]
                sums[c] += len(mine) * functional.normalize(mine.mean(0), dim=0)
        after = federation.round().model[W]
        for c in range(4):
            expected = functional.normalize(
                rho * before[W][c] + (1 - rho) * functional.normalize(sums[c], dim=0), dim=0
            )
            assert_close(after[c], expected, rtol=1e-9, atol=1e-11)
        assert torch.equal(after[4], before[W][4]), "nobody holds class 4"


def test_with_rho_one_prototypes_stay() -> None:
    federation = toy_federation(FedNH(rho=1.0))
    start = federation.state.model[W].clone()
    federation.run(2)
    assert_close(federation.state.model[W], start, rtol=0, atol=1e-7)  # unit length is restored in double precision


def test_server_optimisers_and_local_buffers_leave_prototypes_alone() -> None:
    """They are no statistic of a client and nothing that a server optimiser should rescale."""
    plain, adam = (toy_federation(name) for name in ("fednh", "fednh+fedadam"))
    for federation in (plain, adam):
        federation.round()
    assert torch.equal(plain.state.model[W], adam.state.model[W])
    assert not torch.equal(plain.state.model["hidden.weight"], adam.state.model["hidden.weight"])


def test_what_does_not_fit_is_refused() -> None:
    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 4), nn.ReLU(), nn.Linear(4, CLASSES))

    with pytest.raises(AlgorithmError, match="5 classes and 4 features"):
        toy_federation(FedNH(), network=narrow)
    for other, reason in (("fedetf", "both replace"), ("ccvr", "ccvr would train it")):
        with pytest.raises(AlgorithmError, match=reason):
            build_algorithm(f"fednh+{other}")
    with pytest.raises(AlgorithmError, match="FedFA calibrates the classifier"):
        toy_federation("fedfa+fednh", toy_samples(1))
