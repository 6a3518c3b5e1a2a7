"""What must hold of every method there is, alone and combined with every other.

Methods are taken from the registry, so a new one is tested here without a line being added; where the theory says that
something does not hold for a method, the exception stands below with its reason.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from typer.testing import CliRunner

from fedfa.algorithms.registry import methods, part_types
from fedfa.cli.app import app
from fedfa.data import DataSet
from fedfa.errors import ClientError, RecipeError
from fedfa.learning.client import MODEL, ClientTrainer, RoundPlan
from fedfa.learning.part import Role, Task
from fedfa.learning.random import torch_stream
from fedfa.learning.server import ServerState, finish_round, finish_survey
from fedfa.learning.sums import Sums, Total
from fedfa.learning.tensors import PartTensors, Tensors, clone
from fedfa.models.split import SplitModel
from fedfa.studies.run import run
from tests.algorithms.toy import CLASSES, FEATURES, INPUTS, Network, Samples, toy_samples, toy_settings
from tests.algorithms.transcription import Array, Index
from tests.studies.study_toys import assert_same_run, small

NAMES = sorted(methods())
every_method = pytest.mark.parametrize("method", NAMES)
Data = Sequence[tuple[Array, Index]]

QUICK: dict[str, dict[str, Any]] = {"ccvr": {"samples": 20, "epochs": 2}}
"""Options that save time and change nothing in kind, by part."""


def normalised(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES, bias=bias)
    )


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES, bias=False))


class Play:
    """A federation in memory: real recipe, clients and server, with everything that is kept.

    Batches hold up to eight samples: of 11, 7 and 13 none is then left alone, which BatchNorm could not train on.
    """

    def __init__(
        self,
        recipe: str,
        data: Data | None = None,
        *,
        network: Callable[[], nn.Module] | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 1,
        rounds: int = 2,
        **local: Any,
    ) -> None:
        names = recipe.split("+")
        parts = {kind.name for kind in part_types([methods()[name] for name in names])}
        options = {part: values for part, values in QUICK.items() if part in parts}
        self.settings = toy_settings(
            {"recipe": recipe, **options}, **{"epochs": 1, "batch_size": 8, "lr": 0.05, **local}
        )
        self.recipe, self.seed, self.rounds = self.settings.recipe(), seed, rounds
        data = toy_samples(1) if data is None else data
        self.sizes = [len(y) for _, y in data]
        if self.recipe.pools_data:
            data = [(np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data]))]
        self.clients = [Samples(x, y, dtype=dtype) for x, y in data]
        if network is None:
            network = normalised if "fedbn" in names else Network
        with torch_stream(0, "network"):  # the same start, whatever the seed of the run
            self.model = self.recipe.adapt(SplitModel.of(network().to(dtype)), seed)
        self.network = copy.deepcopy(self.model.module)
        task = Task(self.model, CLASSES, len(self.clients), rounds, self.settings.local.in_round(0))
        self.roles = self.recipe.roles(task)
        self.state = ServerState(0, clone(self.model.state()), self.recipe.init(task, seed))
        self.trainer = ClientTrainer(self.model, self.recipe, self.roles)
        self.kept: dict[int, PartTensors] = {}

    def plan(self, survey: bool = False) -> RoundPlan:
        local = self.settings.local.in_round(self.state.round)
        if self.recipe.pools_data:
            local = replace(local, steps=sum(local.steps_on(size) for size in self.sizes))
        received = self.recipe.broadcast(self.state.parts, self.state.round)
        return RoundPlan(self.state.round, self.state.model, received, local, self.seed, self.rounds, survey)

    def train(self, client: int, survey: bool = False) -> Sums:
        result = self.trainer.train(self.plan(survey), client, self.clients[client], self.kept.get(client, {}))
        if not survey:
            self.kept[client] = result.kept
        return result.sums

    def round(self, order: Sequence[int] | None = None, survey: bool = False) -> Play:
        """One round, or the survey, with all clients added up in this order."""
        total = Total(keep_each=self.recipe.needs_each)
        for client in range(len(self.clients)) if order is None else [k for k in order if k < len(self.clients)]:
            total.add(self.train(client, survey))
        finish = finish_survey if survey else finish_round
        self.state = finish(self.recipe, self.roles, self.state, total, len(self.clients), self.seed)
        return self

    def play(self, rounds: int = 2, order: Sequence[int] | None = None) -> Play:
        """Some rounds, and the survey if the recipe has one."""
        for _ in range(rounds):
            self.round(order)
        return self.round(order, survey=True) if self.recipe.surveys else self

    def model_of(self, client: int) -> Tensors:
        """The model a client has now: the server's, with what it keeps of it."""
        return {**self.state.model, **self.kept.get(client, {}).get(MODEL, {})}

    def everything(self) -> Tensors:
        """All there is after the rounds: the server's state and what clients keep, by name."""
        found = dict(self.state.to_tensors())
        for client, parts in self.kept.items():
            found |= {f"{client}:{part}/{name}": t for part, own in parts.items() for name, t in own.items()}
        return found


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
    "feddyn": "its server adds −h/α, after the first round once more the mean update",
    "fedadagrad": "its server divides by the root of the squares",
    "fedadam": "its server divides by the root of the squares",
    "fedyogi": "its server divides by the root of the squares",
}


@pytest.mark.parametrize("method", [name for name in NAMES if name not in NOT_ONE_SGD_STEP])
def test_one_client_and_one_step_is_a_step_of_sgd(method: str) -> None:
    """The client holds all classes equally often, so that a calibration by label counts shifts all logits alike."""
    x, y = balanced()
    game = Play(method, [(x, y)], batch_size=len(y), weight_decay=0.01, lr=0.1).round()
    network = game.network
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.01)
    functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    optimiser.step()
    expected = dict(network.named_parameters()) | dict(network.named_buffers())
    assert_close(game.model_of(0), {n: t.detach() for n, t in expected.items()}, rtol=1e-10, atol=1e-12)


def test_the_exceptions_are_methods_and_exceptions() -> None:
    """A method that is listed without need would not be tested."""
    for method in NOT_ONE_SGD_STEP:
        with pytest.raises(AssertionError):
            test_one_client_and_one_step_is_a_step_of_sgd(method)


def test_feddyn_makes_that_step_twice() -> None:
    """θ = θ_i − h/α and h = −α (θ_i − θ_t), where one client is all clients."""
    data = [balanced()]
    start = Play("fedavg", data).state.model
    fedavg, feddyn = (Play(name, data, batch_size=15).round().state.model for name in ("fedavg", "feddyn"))
    for name, value in start.items():
        assert_close(feddyn[name] - value, 2 * (fedavg[name] - value), rtol=1e-9, atol=1e-12)


# -- identical clients ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [name for name in NAMES if name != "centralised"])
def test_identical_clients_do_as_one(method: str) -> None:
    """Three clients with the same samples, all in one batch so that the shuffling does not tell them apart.

    Of CCVR the rounds: a covariance of three times the samples has another divisor, N − 1.
    """
    sample = balanced(2)
    one, three = (Play(method, [sample] * count, batch_size=10, epochs=2, rounds=3) for count in (1, 3))
    for _ in range(3):
        one.round()
        three.round()
        for client in range(3):
            assert_close(three.model_of(client), one.model_of(0), rtol=1e-9, atol=1e-11)


def test_identical_clients_do_as_all_data_in_one_place() -> None:
    """FedAvg of three, two steps each, is two steps at one site; and the site of three clients makes all six."""
    sample = balanced(2)
    fedavg = Play("fedavg", [sample] * 3, batch_size=10, epochs=2).play(3)
    site = Play("centralised", [sample], batch_size=10, epochs=2).play(3)
    assert_close(fedavg.state.model, site.state.model, rtol=1e-10, atol=1e-12)
    all_three = Play("centralised", [sample] * 3, batch_size=30, epochs=2).play(3)
    six_steps = Play("fedavg", [sample], batch_size=10, epochs=6).play(3)
    assert_close(all_three.state.model, six_steps.state.model, rtol=1e-10, atol=1e-12)


# -- repeatable, in any order -----------------------------------------------------------------------------------------
@every_method
def test_the_order_of_the_clients_does_not_matter(method: str) -> None:
    """Beyond the rounding of sums in double precision. What clients keep is the same to the last bit in round one."""
    results = [Play(method).play(2, order).everything() for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))]
    for result in results[1:]:
        assert_close(result, results[0], rtol=1e-9, atol=1e-11)


@every_method
def test_a_seed_is_a_run(method: str) -> None:
    """The same seed gives the same bits, whatever torch's own generator did; another seed another shuffling."""
    runs = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)
        runs.append(Play(method, seed=seed).play().everything())
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    assert any(not torch.equal(value, runs[2][name]) for name, value in runs[0].items())


@every_method
def test_a_clients_result_does_not_depend_on_who_was_trained_before(method: str) -> None:
    """One network and one optimiser serve all clients: nothing of a client may stay in them. Bit for bit."""
    alone, after_others = (Play(method, momentum=0.0).round() for _ in range(2))
    last = len(alone.clients) - 1
    for client in range(last):
        after_others.train(client)
    expected, found = alone.train(last), after_others.train(last)
    assert expected.keys() == found.keys()
    for group, entry in expected.items():
        assert torch.equal(entry.weight, found[group].weight), group
        for name, value in entry.tensors.items():
            assert torch.equal(value, found[group].tensors[name]), f"{group} {name}"
    for part, tensors in alone.kept[last].items():
        for name, value in tensors.items():
            assert torch.equal(value, after_others.kept[last][part][name]), f"{part} {name}"


@every_method
def test_nobody_writes_into_what_was_sent_or_kept(method: str) -> None:
    """The broadcast serves every client, and a checkpoint may still be in writing: state is replaced, not changed."""
    game = Play(method).round()
    before, old = game.state, clone(game.everything())
    present = game.everything()
    game.round()
    for name, value in present.items():
        assert torch.equal(value, old[name]), name
    assert game.state is not before


@every_method
def test_stopped_and_resumed_it_ends_the_same(tmp_path: Path, blobs: DataSet, method: str) -> None:
    """Two rounds and two more, through the files, with cohorts: the bits of four rounds."""
    chosen = {part: options for part, options in QUICK.items() if part == method}
    settings = small(method, algorithm=chosen, local={"epochs": 1})
    model = fedbn_network if method == "fedbn" else None

    def stop(record: Mapping[str, Any]) -> None:
        if record["round"] == 3:  # not saved yet
            raise KeyboardInterrupt

    run(settings, tmp_path / "whole", data=blobs, model=model)
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "stopped", data=blobs, model=model, watch=stop)
    run(settings, tmp_path / "stopped", data=blobs, model=model, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def fedbn_network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


# -- awkward clients and networks -------------------------------------------------------------------------------------
@every_method
def test_a_client_without_a_step_does_no_harm(method: str) -> None:
    """Seven samples and batches of eight, incomplete ones left out: in two rounds, with all there is to keep."""
    game = Play(method, batch_size=8, drop_last=True, rounds=3)
    game.play(3)
    assert_finite(game.everything())
    start = Play(method, batch_size=8).state.model
    assert any(not torch.equal(value, start[name]) for name, value in game.model_of(0).items()), "the others do train"


@every_method
def test_without_any_step_the_model_stays(method: str) -> None:
    game = Play(method, batch_size=100, drop_last=True)
    start = clone(game.state.model)
    for _ in range(2):
        game.round()
    assert_finite(game.everything())
    for client in range(len(game.clients)):
        for name, value in game.model_of(client).items():
            assert torch.equal(value, start[name]), name
    if game.recipe.surveys:
        assert_finite(game.round(survey=True).everything())


@every_method
@pytest.mark.parametrize(
    "network", [normalised, without_bias, lambda: normalised(bias=False)], ids=["BN", "no bias", "both"]
)
def test_other_networks_work_or_are_refused(method: str, network: Callable[[], nn.Module]) -> None:
    """BatchNorm, a classifier without bias, both; in single precision, which it keeps."""
    has_norm = any(isinstance(layer, nn.BatchNorm1d) for layer in network().modules())
    if (method, has_norm) in (("fedma", True), ("fedbn", False)):  # the only ones that ask something of the network
        with pytest.raises(RecipeError, match=f"{method} .{{40}}"):
            Play(method, network=network)
        return
    game = Play(method, network=network, dtype=torch.float32)
    shapes = {name: (value.shape, value.dtype) for name, value in game.state.model.items()}
    game.play(2)
    assert_finite(game.everything())
    for client in range(len(game.clients)):
        assert {name: (value.shape, value.dtype) for name, value in game.model_of(client).items()} == shapes


@every_method
def test_a_frozen_layer_stays_as_it_is(method: str) -> None:
    """A parameter that its owner switched off, beside whatever the method does."""

    def frozen() -> nn.Module:
        net = normalised() if method == "fedbn" else without_bias()
        net.get_parameter("0.weight").requires_grad_(False)
        return net

    if method == "fedma":  # permutes the units of all layers
        with pytest.raises(RecipeError, match=r"'0\.weight' is frozen"):
            Play(method, network=frozen)
        return
    game = Play(method, network=frozen)
    start = clone(game.state.model)
    assert game.roles["0.weight"] is Role.FROZEN
    game.play(2)
    assert_finite(game.everything())
    for client in range(len(game.clients)):
        assert torch.equal(game.model_of(client)["0.weight"], start["0.weight"])
        assert not torch.equal(game.model_of(client)["0.bias"], start["0.bias"])


@every_method
def test_a_training_that_diverges_is_told_and_never_averaged(method: str) -> None:
    game = Play(method, dtype=torch.float32, lr=1e30, epochs=3)
    with pytest.raises(ClientError, match=r"not finite.*lower local\.lr"):
        game.play(2)


# -- combinations -----------------------------------------------------------------------------------------------------
OPTIMISERS = [name for name in NAMES if any(part.slot == "server optimiser" for part in methods()[name].parts)]
OTHERS = [name for name in NAMES if name not in OPTIMISERS and name != "fedavg"]


def outcome(recipe: str, played: bool = True) -> str | None:
    """The reason why a combination is refused; None if it can be made and (if asked for) has played a round."""
    try:
        game = Play(recipe, rounds=1)
    except RecipeError as error:
        return str(error)
    if played:
        assert_finite(game.play(1).everything())
    return None


@pytest.mark.parametrize("first", OTHERS)
def test_every_combination_runs_or_says_why_not(first: str) -> None:
    """With every other method, and each such pair with every server optimiser; both orders give the same answer.

    Of the four server optimisers, which differ in arithmetic only, one plays.
    """
    for second in (name for name in OTHERS if name > first):
        pair = f"{first}+{second}"
        reason = outcome(pair)
        assert reason is None or len(reason) > 40, f"{pair}: {reason}"
        assert (outcome(f"{second}+{first}", played=False) is None) == (reason is None), f"{pair}: {reason}"
        for optimiser in OPTIMISERS:
            more = outcome(f"{pair}+{optimiser}", played=optimiser == OPTIMISERS[0])
            assert more is None or len(more) > 40, f"{pair}+{optimiser}: {more}"
            assert reason is None or more is not None, f"{pair} is refused, but not with {optimiser}"


@pytest.mark.parametrize("method", OTHERS)
def test_every_server_optimiser_goes_with_a_method_or_says_why_not(method: str) -> None:
    for optimiser in OPTIMISERS:
        reason = outcome(f"{method}+{optimiser}")
        assert reason is None or len(reason) > 40, f"{method}+{optimiser}: {reason}"


def test_two_server_optimisers_are_one_too_many() -> None:
    for first in OPTIMISERS:
        for second in OPTIMISERS:
            if first != second:
                assert "server optimiser" in str(outcome(f"{first}+{second}"))


@every_method
def test_naming_fedavg_beside_a_method_changes_nothing(method: str) -> None:
    alone, named = (Play(recipe).play() for recipe in (method, f"fedavg+{method}"))
    assert all(torch.equal(value, named.everything()[name]) for name, value in alone.everything().items())


NO_SHARED_MODEL = ("local", "fedproto")
"""Methods whose clients keep their whole model: nothing of it reaches the server."""


@pytest.mark.parametrize("method", NO_SHARED_MODEL)
@pytest.mark.parametrize("other", [*OPTIMISERS, "fedprox", "moon", "scaffold", "feddyn", "fednova", "ccvr", "fedma"])
def test_what_acts_on_a_shared_model_is_refused_where_there_is_none(method: str, other: str) -> None:
    """Else it would silently do nothing."""
    reason = outcome(f"{method}+{other}")
    assert reason is not None


# -- the words --------------------------------------------------------------------------------------------------------
@every_method
def test_the_explanation_says_what_every_explanation_says(method: str) -> None:
    text = methods()[method].explanation()
    assert re.search(r"\b(19|20)\d\d\b", text), "a reference with its year"
    assert "*" in text, "the reference's title"
    assert "Sends" in text
    assert re.search(r"\bkeeps?:", text)
    assert re.search(r"What\s+the\s+server\s+learns", text)
    assert len(text.splitlines()[0]) < 120


@every_method
def test_every_option_is_explained(method: str) -> None:
    """By the text under it in the source."""
    for part in methods()[method].parts:
        for option, field in part.options_type.model_fields.items():
            assert field.description, f"{part.name}.{option}"


@every_method
def test_the_command_line_explains_it(method: str) -> None:
    result = CliRunner().invoke(app, ["algorithms", method])
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    assert "Sends" in printed
    for part in methods()[method].parts:
        for option in part.options_type.model_fields:
            assert f"algorithm.{part.name}.{option} = " in printed
    listed = CliRunner().invoke(app, ["algorithms"])
    assert method in listed.output


@every_method
def test_it_has_the_two_variants_of_every_method(method: str) -> None:
    assert methods()[method].variants.keys() >= {"paper", "authors"}
    for variant in methods()[method].variants:
        settings = toy_settings({"recipe": method, "variant": variant})
        assert settings.algorithm.variant == variant
        assert math.isclose(settings.local.lr_decay, 0.99) == (variant == "authors")
