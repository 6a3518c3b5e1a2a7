"""The contribution spec that the server derives matches what clients send, for every method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from fedfa.algorithms.registry import methods
from fedfa.data import DataSet
from fedfa.experiment.experiment import Experiment
from fedfa.flower.checks import UpdateValidator, contribution_spec, resolve_norm_limit
from fedfa.flower.cost import SERVER, STAGES, WAITING, cost_of_rounds
from fedfa.flower.messages import BadMessageError, SiteResult
from fedfa.learning.client import ClientResult, ClientTrainer, RoundPlan
from fedfa.learning.context import LocalTraining
from fedfa.learning.round import ClientStatesInMemory
from fedfa.learning.tensors import ComponentTensors
from tests.experiment.run_toys import small
from tests.flower.small_sites import serve, simulate, small_grid

METHODS = [name for name, method in methods().items() if not any(c.traits.pooled_data for c in method.components)]


class Normed(nn.Module):
    """A network that every method supports: normalisation layers, a ReLU before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.relu(self.norm(self.first(x))))
        return logits


def two_rounds(experiment: Experiment) -> list[tuple[UpdateValidator, ClientResult]]:
    """Validators and client results of two rounds and the final pass."""
    training, local = experiment.training, experiment.local_engine()
    trainer = ClientTrainer(experiment.task.model, experiment.algorithm, experiment.roles, experiment.device)
    example, state = experiment.federation.dataset.train.inputs[:2], training.init()
    found: list[tuple[UpdateValidator, ClientResult]] = []

    def train(
        plan: RoundPlan, clients: Sequence[int], client_state: Callable[[int], ComponentTensors]
    ) -> Iterator[ClientResult]:
        spec, limit = contribution_spec(trainer, plan, example), resolve_norm_limit(0, plan.model)
        validator = UpdateValidator("ab" * 16, plan, spec, experiment.algorithm, limit)
        for result in local.train(plan, clients, client_state):
            found.append((validator, result))
            yield result

    states = ClientStatesInMemory()
    for final_pass in (False, False, *([True] if experiment.algorithm.has_final_pass else [])):
        round_local, cohort = experiment.local.in_round(state.round), experiment.cohort(state.round)
        state, _ = training.apply(state, cohort, round_local, train, states, final_pass=final_pass)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_method_sends_contributions_that_match_the_spec(method: str, blobs: DataSet) -> None:
    model = None if method == "matching" else Normed  # which matches neurons of plain layers
    experiment = Experiment.from_config(small(method), model=model, data=blobs)
    sent = two_rounds(experiment)
    assert len(sent) >= 8
    for validator, result in sent:
        samples = int(experiment.sizes[result.client])
        reply = SiteResult(result, validator.run, validator.plan.round, False)
        validator.check(reply, result.client, samples)
        with pytest.raises(BadMessageError):
            validator.check(reply, result.client, samples // 2)


def test_deriving_the_spec_does_not_change_the_model(blobs: DataSet) -> None:
    """It trains the server's copy of the network for a step; plan and state must not change."""
    experiment = Experiment.from_config(small("scaffold"), model=Normed, data=blobs)
    state = experiment.training.init()
    before = {name: value.clone() for name, value in state.model.items()}
    trainer = ClientTrainer(experiment.task.model, experiment.algorithm, experiment.roles, experiment.device)
    contribution_spec(
        trainer, experiment.training.plan(state, experiment.config.local.in_round(0)), blobs.train.inputs[:2]
    )
    assert all(torch.equal(value, before[name]) for name, value in state.model.items())


@pytest.mark.parametrize("samples", [0, 1, 5, 16, 33])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("steps", [None, 1, 7])
def test_the_steps_of_a_client_follow_from_its_plan(
    samples: int, drop_last: bool, steps: int | None, blobs: DataSet
) -> None:
    """Against the loop itself, for every kind of plan."""
    experiment = Experiment.from_config(small("fedavg"), data=blobs)
    local = LocalTraining(
        epochs=2, batch_size=16, lr=0.1, momentum=0.0, weight_decay=0.0, drop_last=drop_last, steps=steps
    )
    trainer = ClientTrainer(experiment.task.model, experiment.algorithm, experiment.roles, experiment.device)

    class Data:
        size = samples
        label_counts = torch.bincount(blobs.train.labels[:samples], minlength=4)

        def batch(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return blobs.train.inputs[positions], blobs.train.labels[positions]

    result = trainer.train(experiment.training.plan(experiment.training.init(), local), 0, Data(), {})
    assert local.work_on(samples) == (result.steps, result.sample_steps)


def test_the_cost_of_a_round_is_reported_by_stage(tmp_path: Path) -> None:
    flower = serve(tmp_path / "flower", small_grid(tmp_path))
    rows = dict(cost_of_rounds(flower, simulate(tmp_path / "simulated").directory))
    assert rows.keys() == {*STAGES.values(), WAITING, SERVER, "a round over Flower", "a round in the simulator"}
    assert all(seconds >= 0 for seconds in rows.values())
    assert rows[STAGES["site train"]] > 0
    assert rows["a round over Flower"] > rows[STAGES["site train"]]
