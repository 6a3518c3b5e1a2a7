"""What must hold of every method there is, alone and combined with every other.

Methods are taken from the registry, so a new one is tested here without a line being added; where the theory says that
something does not hold for a method, the exception stands below with its reason.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from typer.testing import CliRunner

from fedfa.algorithms.registry import component_types, methods, option_names
from fedfa.cli.app import app
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ClientError
from fedfa.experiment.run import run
from fedfa.learning.aggregate import flatten_contribution
from fedfa.learning.context import Role
from fedfa.learning.tensors import clone, flatten
from tests.algorithms.federation_harness import Federation
from tests.algorithms.toy import CLASSES, FEATURES, INPUTS, assert_same_bits, toy_config, toy_federation
from tests.algorithms.transcription import Array, Index
from tests.experiment.run_toys import assert_same_run, small

NAMES = sorted(methods())
every_method = pytest.mark.parametrize("method", NAMES)
Data = Sequence[tuple[Array, Index]]

QUICK: dict[str, dict[str, Any]] = {"ccvr": {"samples": 20, "epochs": 2}}
"""Options that save time and change nothing in kind, by component."""


def normalised(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES, bias=bias)
    )


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES, bias=False))


def federation_of(expression: str, data: Data | None = None, **more: Any) -> Federation:
    """The toy federation of an algorithm expression, with little work.

    Batches hold up to eight samples: of 11, 7 and 13 none is then left alone, which BatchNorm could not train on.
    """
    names = expression.split("+")
    components = {kind.name for kind in component_types([methods()[name] for name in names])}
    options = {component: values for component, values in QUICK.items() if component in components}
    default = {
        "epochs": 2 if "fedrep" in names else 1,  # one for the classifier, one for the rest
        "batch_size": 8,
        "lr": 0.05,
        "rounds": 2,
        "network": normalised if "fedbn" in names else None,
    }
    return toy_federation({"name": expression, **options}, data, **{**default, **more})


def assert_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        assert torch.isfinite(value).all(), name


def balanced(copies: int = 3, seed: int = 0) -> tuple[Array, Index]:
    """A client that holds every class equally often."""
    rng = np.random.default_rng(seed)
    y = np.tile(np.arange(CLASSES), copies)
    return rng.normal(size=(CLASSES, INPUTS))[y] + 0.5 * rng.normal(size=(len(y), INPUTS)), y


# -- one client, one step ---------------------------------------------------------------------------------------------
NOT_ONE_SGD_STEP = {
    "fedfa": "pulls features to the initial anchors and trains the classifier on them from the first step on",
    "fedfac": "pulls features to the anchors from the first step on",
    "feddyn": "its server adds −h/α, after the first round once more the mean update",
    "fednh": "its server moves the prototypes, which no client trains",
    "feddecorr": "its loss has a second term from the first step on",
    "fedsam": "its gradient is that of another point from the first step on",
    "fedrep": "trains the classifier in a step of its own, and keeps it",
    "fedadagrad": "its server divides by the root of the squares",
    "fedadam": "its server divides by the root of the squares",
    "fedyogi": "its server divides by the root of the squares",
}


@pytest.mark.parametrize("method", [name for name in NAMES if name not in NOT_ONE_SGD_STEP])
def test_one_client_and_one_step_is_a_step_of_sgd(method: str) -> None:
    """The client holds all classes equally often, so that a calibration by label counts shifts all logits alike."""
    x, y = balanced()
    federation = federation_of(method, [(x, y)], batch_size=len(y), weight_decay=0.01, lr=0.1)
    network = copy.deepcopy(federation.model.module)
    federation.round()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.01)
    functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    optimiser.step()
    expected = dict(network.named_parameters()) | dict(network.named_buffers())
    assert_close(federation.model_of(0), {n: t.detach() for n, t in expected.items()}, rtol=1e-10, atol=1e-12)


def test_the_exceptions_are_methods_and_exceptions() -> None:
    """A method that is listed without need would not be tested."""
    for method in NOT_ONE_SGD_STEP:
        with pytest.raises(AssertionError):
            test_one_client_and_one_step_is_a_step_of_sgd(method)


def test_feddyn_makes_that_step_twice() -> None:
    """θ = θ_i − h/α and h = −α (θ_i − θ_t), where one client is all clients."""
    data = [balanced()]
    start = federation_of("fedavg", data).state.model
    fedavg, feddyn = (federation_of(name, data, batch_size=15).round().model for name in ("fedavg", "feddyn"))
    for name, value in start.items():
        assert_close(feddyn[name] - value, 2 * (fedavg[name] - value), rtol=1e-9, atol=1e-12)


# -- identical clients ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [name for name in NAMES if name != "centralised"])
def test_identical_clients_do_as_one(method: str) -> None:
    """Three clients with the same samples, all in one batch so that the shuffling does not tell them apart.

    Of CCVR the rounds: a covariance of three times the samples has another divisor, N − 1.
    """
    sample = balanced(2)
    one, three = (federation_of(method, [sample] * count, batch_size=10, epochs=2, rounds=3) for count in (1, 3))
    for _ in range(3):
        one.round()
        three.round()
        for client in range(3):
            assert_close(three.model_of(client), one.model_of(0), rtol=1e-9, atol=1e-11)


def test_identical_clients_do_as_all_data_in_one_place() -> None:
    """FedAvg of three, two steps each, is two steps at one site; and the site of three clients makes all six."""
    sample = balanced(2)
    fedavg = federation_of("fedavg", [sample] * 3, batch_size=10, epochs=2).run(3)
    site = federation_of("centralised", [sample], batch_size=10, epochs=2).run(3)
    assert_close(fedavg.state.model, site.state.model, rtol=1e-10, atol=1e-12)
    all_three = federation_of("centralised", [sample] * 3, batch_size=30, epochs=2).run(3)
    six_steps = federation_of("fedavg", [sample], batch_size=10, epochs=6).run(3)
    assert_close(all_three.state.model, six_steps.state.model, rtol=1e-10, atol=1e-12)


# -- repeatable, in any order -----------------------------------------------------------------------------------------
@every_method
def test_the_order_of_the_clients_does_not_matter(method: str) -> None:
    """Beyond the rounding of sums in double precision. What clients keep is the same to the last bit in round one."""
    results = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        federation = federation_of(method)
        results.append(federation.run(2, [client for client in order if client < len(federation.clients)]).tensors())
    for result in results[1:]:
        assert_close(result, results[0], rtol=1e-9, atol=1e-11)


@every_method
def test_a_seed_is_a_run(method: str) -> None:
    """The same seed gives the same bits, whatever torch's own generator did; another seed another shuffling."""
    runs = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)
        runs.append(federation_of(method, seed=seed).run(2).tensors())
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    assert any(not torch.equal(value, runs[2][name]) for name, value in runs[0].items())


@every_method
def test_a_clients_result_does_not_depend_on_clients_trained_before(method: str) -> None:
    """One network and one optimiser serve all clients: nothing of a client may stay in them. Bit for bit."""
    alone, after_others = (federation_of(method, momentum=0.0) for _ in range(2))
    alone.round()
    after_others.round()
    last = len(alone.clients) - 1
    for client in range(last):
        after_others.train(client)
    expected, found = alone.train(last), after_others.train(last)
    assert_same_bits(flatten_contribution(found.contribution), flatten_contribution(expected.contribution))
    assert_same_bits(flatten(found.client_state), flatten(expected.client_state))


@every_method
def test_a_round_changes_no_earlier_state_in_place(method: str) -> None:
    """The broadcast serves every client, and a checkpoint may still be in writing: state is replaced, not changed."""
    federation = federation_of(method)
    before = federation.round()
    present = federation.tensors()
    old = clone(present)
    assert federation.round() is not before
    assert_same_bits(present, old)


@every_method
def test_stopped_and_resumed_it_ends_the_same(tmp_path: Path, blobs: DataSet, method: str) -> None:
    """Two rounds and two more, through the files, with cohorts: the bits of four rounds."""
    chosen = {component: options for component, options in QUICK.items() if component == method}
    config = small(method, algorithm=chosen, local={"epochs": 2 if method == "fedrep" else 1})
    model = fedbn_network if method == "fedbn" else None

    def stop(record: Mapping[str, Any]) -> None:
        if record["round"] == 3:  # not saved yet
            raise KeyboardInterrupt

    run(config, tmp_path / "whole", data=blobs, model=model)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", data=blobs, model=model, watch=stop)
    run(config, tmp_path / "stopped", data=blobs, model=model, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def fedbn_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


# -- awkward clients and networks -------------------------------------------------------------------------------------
@every_method
def test_a_client_without_a_step_does_no_harm(method: str) -> None:
    """Seven samples and batches of eight, incomplete ones left out: in two rounds, with all client state."""
    federation = federation_of(method, batch_size=8, drop_last=True, rounds=3)
    federation.run(3)
    assert_finite(federation.tensors())
    start = federation_of(method, batch_size=8).state.model
    assert any(not torch.equal(value, start[name]) for name, value in federation.model_of(0).items()), (
        "the others do train"
    )


@every_method
def test_without_any_step_the_model_stays(method: str) -> None:
    federation = federation_of(method, batch_size=100, drop_last=True)
    start = clone(federation.state.model)
    for _ in range(2):
        federation.round()
    assert_finite(federation.tensors())
    for client in range(len(federation.clients)):
        for name, value in federation.model_of(client).items():
            assert torch.equal(value, start[name]), name
    if federation.algorithm.has_final_pass:
        assert_finite(federation.round(final_pass=True).to_tensors())


@every_method
@pytest.mark.parametrize(
    "network", [normalised, without_bias, lambda: normalised(bias=False)], ids=["BN", "no bias", "both"]
)
def test_other_networks_work_or_are_refused(method: str, network: Callable[[], nn.Module]) -> None:
    """BatchNorm, a classifier without bias, both; in single precision, which it keeps."""
    has_norm = any(isinstance(layer, nn.BatchNorm1d) for layer in network().modules())
    if (method, has_norm) in (("matching", True), ("fedbn", False)):  # the only ones that ask something of the network
        with pytest.raises(AlgorithmError, match=f"{method} .{{40}}"):
            federation_of(method, network=network)
        return
    federation = federation_of(method, network=network, dtype=torch.float32)
    shapes = {name: (value.shape, value.dtype) for name, value in federation.state.model.items()}
    federation.run(2)
    assert_finite(federation.tensors())
    for client in range(len(federation.clients)):
        assert {name: (value.shape, value.dtype) for name, value in federation.model_of(client).items()} == shapes


@every_method
def test_a_frozen_layer_stays_as_it_is(method: str) -> None:
    """A parameter that its owner switched off, beside whatever the method does."""

    def frozen() -> nn.Module:
        net = normalised() if method == "fedbn" else without_bias()
        net.get_parameter("0.weight").requires_grad_(False)
        return net

    if method == "matching":  # permutes the units of all layers
        with pytest.raises(AlgorithmError, match=r"'0\.weight' is frozen"):
            federation_of(method, network=frozen)
        return
    federation = federation_of(method, network=frozen)
    start = clone(federation.state.model)
    assert federation.training.roles["0.weight"] is Role.FROZEN
    federation.run(2)
    assert_finite(federation.tensors())
    for client in range(len(federation.clients)):
        assert torch.equal(federation.model_of(client)["0.weight"], start["0.weight"])
        assert not torch.equal(federation.model_of(client)["0.bias"], start["0.bias"])


@every_method
def test_a_training_that_diverges_is_refused_and_never_averaged(method: str) -> None:
    federation = federation_of(method, dtype=torch.float32, lr=1e30, epochs=3)
    with pytest.raises(ClientError, match=r"not finite.*lower local\.lr"):
        federation.run(2)


# -- combinations -----------------------------------------------------------------------------------------------------
OPTIMISERS = [
    name
    for name in NAMES
    if any(component.traits.slot == "server optimiser" for component in methods()[name].components)
]
OTHERS = [name for name in NAMES if name not in OPTIMISERS and name != "fedavg"]


def outcome(algorithm: str, trained: bool = True) -> str | None:
    """The reason why a combination is refused; None if it can be made and (if asked for) has trained a round."""
    try:
        federation = federation_of(algorithm, rounds=1)
    except AlgorithmError as error:
        return str(error)
    if trained:
        assert_finite(federation.run(1).tensors())
    return None


@pytest.mark.parametrize("first", OTHERS)
def test_every_combination_runs_or_is_refused_with_a_reason(first: str) -> None:
    """With every other method, and each such pair with every server optimiser; both orders give the same answer.

    Of the server optimisers, which differ in arithmetic only, one trains.
    """
    for second in (name for name in OTHERS if name > first):
        pair = f"{first}+{second}"
        reason = outcome(pair)
        assert reason is None or len(reason) > 40, f"{pair}: {reason}"
        assert (outcome(f"{second}+{first}", trained=False) is None) == (reason is None), f"{pair}: {reason}"
        for optimiser in OPTIMISERS:
            more = outcome(f"{pair}+{optimiser}", trained=optimiser == "fedadagrad")
            assert more is None or len(more) > 40, f"{pair}+{optimiser}: {more}"
            assert reason is None or more is not None, f"{pair} is refused, but not with {optimiser}"


@pytest.mark.parametrize("method", OTHERS)
def test_every_server_optimiser_combines_with_a_method_or_is_refused_with_a_reason(method: str) -> None:
    for optimiser in OPTIMISERS:
        reason = outcome(f"{method}+{optimiser}")
        assert reason is None or len(reason) > 40, f"{method}+{optimiser}: {reason}"


def test_two_server_optimisers_are_one_too_many() -> None:
    for first in OPTIMISERS:
        for second in OPTIMISERS:
            if first != second and {first, second} != {"fedacg", "fedfac"}:  # fedfac's is fedacg
                assert "server optimiser" in str(outcome(f"{first}+{second}"))


@every_method
def test_naming_fedavg_beside_a_method_changes_nothing(method: str) -> None:
    alone, named = (federation_of(algorithm).run(2) for algorithm in (method, f"fedavg+{method}"))
    assert_same_bits(named.tensors(), alone.tensors())


NO_SHARED_MODEL = ("local", "fedproto")
"""Methods whose clients keep their whole model: nothing of it reaches the server."""


@pytest.mark.parametrize("method", NO_SHARED_MODEL)
@pytest.mark.parametrize("other", [*OPTIMISERS, "fedprox", "moon", "scaffold", "feddyn", "fednova", "ccvr", "matching"])
def test_what_acts_on_a_shared_model_is_refused_where_there_is_none(method: str, other: str) -> None:
    """Else it would silently do nothing."""
    reason = outcome(f"{method}+{other}")
    assert reason is not None


# -- descriptions -----------------------------------------------------------------------------------------------------
@every_method
def test_the_explanation_of_a_method_is_complete(method: str) -> None:
    text = methods()[method].explanation()
    assert re.search(r"\b(19|20)\d\d\b", text), "a reference with its year"
    assert "*" in text, "the reference's title"
    assert "Sends" in text
    assert re.search(r"\b(keeps?|state):", text), "server and client state"
    assert re.search(r"What\s+the\s+server\s+learns", text)
    assert len(text.splitlines()[0]) < 120


@every_method
def test_every_option_is_explained(method: str) -> None:
    """By the text under it in the source."""
    for component in methods()[method].components:
        for option, field in component.model_fields.items():
            assert field.description, f"{component.name}.{option}"


@every_method
def test_the_command_line_explains_it(method: str) -> None:
    result = CliRunner().invoke(app, ["algorithms", method])
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    assert "Sends" in printed
    for component in methods()[method].components:
        for option in option_names(component):
            assert f"algorithm.{component.name}.{option} = " in printed
    listed = CliRunner().invoke(app, ["algorithms"])
    assert method in listed.output


@every_method
def test_it_has_the_two_variants_of_every_method(method: str) -> None:
    assert methods()[method].variants.keys() >= {"paper", "authors"}
    for variant in methods()[method].variants:
        config = toy_config({"name": method, "variant": variant})
        assert config.algorithm.variant == variant
        assert math.isclose(config.local.lr_decay, 0.99) == (variant == "authors")
