"""FedProx against hand-derived steps, closed forms and autograd's own gradient of its term."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from fedfa.algorithms import FedAvg, FedDyn, FedProx, Scaffold
from tests.algorithms.quadratics import (
    Quadratics,
    assert_takes_clients_without_a_step,
    assert_takes_odd_roles,
)
from tests.algorithms.toy import Network, assert_same_rounds, shuffled, toy_federation, toy_samples


def test_two_steps_by_hand() -> None:
    """f(w) = (w − 1)², so f′ = 2(w − 1); w_t = 0, η = 0.1, μ = 0.5.

    Step 1: the term has no gradient at w_t; w = 0 − 0.1·(−2) = 0.2.
    Step 2: −1.6 + 0.5·0.2 = −1.5; w = 0.35. (Without the term 0.36.)
    """
    federation = Quadratics(FedProx(mu=0.5), [2], [1], steps=2)
    federation.round()
    assert federation.value == pytest.approx(0.35, rel=1e-14)


def test_many_steps_reach_the_minimum_of_the_regularised_loss() -> None:
    """Minimum of (w − b)ᵀA(w − b)/2 + μ/2 ‖w − w_t‖² is (A + μ)⁻¹ (A b + μ w_t); here (2·1 + 0.5·3)/2.5 = 1.4."""
    federation = Quadratics(FedProx(mu=0.5), [2], [1], steps=200, start=[3.0])
    federation.round()
    assert federation.value == pytest.approx(1.4, rel=1e-12)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_it_is_the_gradient_of_the_term_in_the_loss(momentum: float, decay: float) -> None:
    """Clients of a real network, against torch's SGD on cross-entropy + μ/2 Σ ‖w − w_t‖² built with its graph."""
    federation = toy_federation(FedProx(mu=0.7), epochs=2, lr=0.1, momentum=momentum, weight_decay=decay)
    start = {name: value.clone() for name, value in federation.state.model.items()}
    for client, (x, y) in enumerate(toy_samples(1)):
        network = Network().double()
        network.load_state_dict(start)
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
        for epoch in shuffled(1, 0, client, len(y), epochs=2):
            for batch in epoch:
                loss = functional.cross_entropy(network(torch.from_numpy(x)[batch]), torch.from_numpy(y)[batch])
                for name, parameter in network.named_parameters():
                    loss = loss + 0.7 / 2 * (parameter - start[name]).square().sum()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        sent = federation.train(client).contribution["fedavg/model"]
        for name, parameter in network.named_parameters():
            assert_close(sent.tensors[name] / len(y), parameter.detach() - start[name], rtol=1e-9, atol=1e-13)


def test_without_mu_it_is_fedavg_bit_for_bit() -> None:
    assert_same_rounds(toy_federation(FedProx(mu=0.0)), toy_federation(FedAvg()))


def test_the_recorded_loss_is_that_of_the_data() -> None:
    """In the first step the term is zero; in the second (w = 0.2) the loss is (0.2 − 1)² = 0.64, without μ/2·0.04."""
    federation = Quadratics(FedProx(mu=0.5), [2], [1], steps=2)
    assert federation.train(0).loss == pytest.approx((1 + 0.64) / 2, rel=1e-12)


def test_one_client_with_one_step_is_plain_sgd() -> None:
    """The term acts from the second step on: 3 − 0.1·2·(3 − 1) = 2.6."""
    federation = Quadratics(FedProx(), [2], [1], start=[3.0])
    federation.round()
    assert federation.value == pytest.approx(2.6, rel=1e-14)


def test_any_roles_and_clients_without_a_step() -> None:
    assert_takes_odd_roles(FedProx())
    assert_takes_clients_without_a_step(FedProx())


def test_a_parameter_that_a_batch_does_not_use_is_left_alone() -> None:
    """Such a parameter has no gradient to add to; it stays where it is, as in FedAvg."""

    class WithSpare(Network):
        def __init__(self) -> None:
            super().__init__()
            self.spare = torch.nn.Parameter(torch.ones(2))

    federations = [toy_federation(method, network=WithSpare) for method in (FedProx(), FedDyn(), Scaffold())]
    for federation in federations:
        federation.round()
        federation.round()
        assert federation.state.model["spare"].tolist() == [1.0, 1.0]
