"""FedRS: the gradients of the restricted softmax against their formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import FedAvg, FedRS
from fedfa.algorithms.registry import build_algorithm
from fedfa.errors import AlgorithmError
from tests.algorithms.toy import HELD, assert_same_rounds, batch_of, client_context, features_of, toy_federation


def test_logits_of_absent_classes_are_scaled() -> None:
    """Counts 3, 0, 1, 0 and α = ¼: logits 4, 8, −2, −4 become 4, 2, −2, −1."""
    ctx = client_context(torch.zeros(4, 2, dtype=torch.float64), [3, 0, 1, 0])
    component = FedRS(alpha=0.25)
    component.begin(ctx)
    logits = torch.tensor([[4.0, 8.0, -2.0, -4.0]], dtype=torch.float64)
    found = component.logits(ctx, batch_of([[0.0, 0.0]], [0]), logits)
    assert found.tolist() == [[4.0, 2.0, -2.0, -1.0]]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_an_absent_row_is_moved_alpha_times_as_hard(alpha: float) -> None:
    """One step of one client: Δw_c = −η α_c mean((ψ_c − 1[y = c]) h), ψ the softmax of the restricted logits."""
    federation = toy_federation(FedRS(alpha=alpha), lr=0.1, weight_decay=0.0, batch_size=64, epochs=1)
    start = federation.state.model
    for client, data in enumerate(federation.clients):
        h = features_of(start, data.x)
        scale = torch.tensor([1.0 if c in HELD[client] else alpha for c in range(5)], dtype=torch.float64)
        shares = ((h @ start["classifier.weight"].T + start["classifier.bias"]) * scale).softmax(1)
        error = (shares - functional.one_hot(data.y, 5)) * scale
        update = federation.train(client).contribution["fedavg/model"]
        found = update.tensors["classifier.weight"] / update.weight
        assert_close(found, -0.1 * error.T @ h / len(h), rtol=1e-9, atol=1e-12)
        absent = [c for c in range(5) if c not in HELD[client]]
        assert bool(found[absent].any()) == (alpha > 0)


def test_with_alpha_one_it_is_fedavg_bit_for_bit_and_label_shifts_are_not_mixed() -> None:
    assert_same_rounds(toy_federation(FedRS(alpha=1)), toy_federation(FedAvg()))
    for other in ("fedlc", "fedetf"):
        with pytest.raises(AlgorithmError, match="both a logit calibration"):
            build_algorithm(f"fedrs+{other}")
