"""What the server expects of an update is what clients send, for every method there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedfa.algorithms.registry import methods
from fedfa.data import DataSet
from fedfa.engines.local import LocalEngine
from fedfa.flower.checks import Expected, form_of, largest_norm
from fedfa.flower.cost import SERVER, STAGES, WAITING, cost_of_rounds
from fedfa.flower.messages import BadMessageError, SiteResult
from fedfa.learning.client import ClientResult, ClientTrainer
from fedfa.learning.part import LocalTraining
from fedfa.learning.server import ServerState, finish_round
from fedfa.learning.sums import Total
from fedfa.studies.setup import Laboratory, prepare
from tests.flower.small_sites import serve, simulate, small_grid
from tests.studies.study_toys import small

METHODS = [name for name, method in methods().items() if not any(part.pools_data for part in method.parts)]


class Normed(nn.Module):
    """A network with which every method can work: normalisation to keep at home, a ReLU before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.relu(self.norm(self.first(x))))
        return logits


def two_rounds(lab: Laboratory) -> list[tuple[Expected, ClientResult]]:
    """What is expected and what clients send, in the first rounds and the survey."""
    local = LocalEngine(lab.federation, lab.task.model, lab.recipe, lab.roles, lab.device)
    trainer = ClientTrainer(lab.task.model, lab.recipe, lab.roles, lab.device)
    example, state = lab.federation.dataset.train.inputs[:2], lab.initial_state()
    found: list[tuple[Expected, ClientResult]] = []
    kept: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
    while True:
        done = state.round == 2
        if done and not lab.recipe.surveys:
            return found
        plan = replace(lab.plan(state, lab.settings.local.in_round(state.round)), survey=done)
        expected = Expected("ab" * 16, plan, form_of(trainer, plan, example), lab.recipe, largest_norm(0, plan.model))
        total = Total(keep_each=lab.recipe.needs_each)
        for result in local.train(plan, lab.cohort(state.round), lambda client: kept.get(client, {})):
            found.append((expected, result))
            kept[result.client] = result.kept
            total.add(result.sums)
        if done:
            return found
        state = finish_round(lab.recipe, lab.roles, state, total, lab.task.num_clients, lab.settings.seed)
        assert isinstance(state, ServerState)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_sends_what_is_expected_of_it(method: str, blobs: DataSet) -> None:
    model = None if method == "fedma" else Normed  # which matches neurons of plain layers
    lab = prepare(small(method), model=model, data=blobs)
    sent = two_rounds(lab)
    assert len(sent) >= 8
    for expected, result in sent:
        samples = int(lab.sizes[result.client])
        reply = SiteResult(result, expected.run, expected.plan.round, False)
        expected.check(reply, result.client, samples)
        with pytest.raises(BadMessageError):
            expected.check(reply, result.client, samples // 2)


def test_the_form_is_found_without_a_trace_in_the_model_or_the_next_round(blobs: DataSet) -> None:
    """It trains the server's copy of the network for a step; the plan and the state must not notice."""
    lab = prepare(small("scaffold"), model=Normed, data=blobs)
    state = lab.initial_state()
    before = {name: value.clone() for name, value in state.model.items()}
    trainer = ClientTrainer(lab.task.model, lab.recipe, lab.roles, lab.device)
    form_of(trainer, lab.plan(state, lab.settings.local.in_round(0)), blobs.train.inputs[:2])
    assert all(torch.equal(value, before[name]) for name, value in state.model.items())


@pytest.mark.parametrize("samples", [0, 1, 5, 16, 33])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("steps", [None, 1, 7])
def test_the_work_of_a_client_follows_from_its_plan(
    samples: int, drop_last: bool, steps: int | None, blobs: DataSet
) -> None:
    """Against the loop itself, for every kind of plan."""
    lab = prepare(small("fedavg"), data=blobs)
    local = LocalTraining(
        epochs=2, batch_size=16, lr=0.1, momentum=0.0, weight_decay=0.0, drop_last=drop_last, steps=steps
    )
    trainer = ClientTrainer(lab.task.model, lab.recipe, lab.roles, lab.device)

    class Data:
        size = samples
        label_counts = torch.bincount(blobs.train.labels[:samples], minlength=4)

        def batch(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return blobs.train.inputs[positions], blobs.train.labels[positions]

    result = trainer.train(lab.plan(lab.initial_state(), local), 0, Data(), {})
    assert local.work_on(samples) == (result.steps, result.sample_steps)


def test_the_cost_of_a_round_is_told_by_stage(tmp_path: Path) -> None:
    flower = serve(tmp_path / "flower", small_grid(tmp_path))
    rows = dict(cost_of_rounds(flower, simulate(tmp_path / "simulated").folder))
    assert rows.keys() == {*STAGES.values(), WAITING, SERVER, "a round over Flower", "a round in the simulator"}
    assert all(seconds >= 0 for seconds in rows.values())
    assert rows[STAGES["site train"]] > 0
    assert rows["a round over Flower"] > rows[STAGES["site train"]]
