from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from fedfa.errors import ClientError, ConfigError
from fedfa.learning import local_loop
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.client import MODEL, ClientResult
from fedfa.learning.component import Component
from fedfa.learning.context import Batch, ClientContext, Role, Task
from fedfa.learning.tensors import ComponentTensors, Tensors, clone
from fedfa.models.split import SplitModel
from tests.learning.learning_toys import CLASSES, WIDTH, Bench, local, toy_data, toy_network


def update_of(result: ClientResult) -> Tensors:
    entry = result.contribution["fedavg/model"]
    return {name: value / entry.weight for name, value in entry.tensors.items()}


# -- the order of events ----------------------------------------------------------------------------------------------
class Probe(Component):
    """Records every hook that is called."""

    title: str = ""
    calls: Any = Field(default_factory=list)

    def _note(self, hook: str) -> None:
        self.calls.append(self.title + hook)

    def begin(self, ctx: ClientContext) -> None:
        self._note("begin")

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        self._note("logits")
        return logits

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        self._note("loss")
        return loss

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        self._note("gradient")

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        self._note("after_step")

    def after_epoch(self, ctx: ClientContext) -> None:
        self._note("after_epoch")

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        self._note("contribute")
        return {}


class SecondProbe(Probe):
    name = "second"


BATCH = ["logits", "loss", "gradient", "after_step"]


def test_hooks_are_called_in_the_documented_order() -> None:
    probe = Probe()
    Bench([probe]).trainer.train(Bench().plan(), 0, toy_data(10), {})  # 2 epochs of 3 batches (4 + 4 + 2)
    epoch = [*BATCH * 3, "after_epoch"]
    assert probe.calls == ["begin", *epoch, *epoch, "contribute"]


def test_each_hook_runs_for_all_components_before_the_next_one() -> None:
    calls: list[str] = []
    first, second = Probe(title="1 ", calls=calls), SecondProbe(title="2 ", calls=calls)
    Bench([first, second]).trainer.train(Bench().plan(how=local(epochs=1)), 0, toy_data(4), {})
    hooks = ["begin", *BATCH, "after_epoch", "contribute"]
    assert calls == [f"{number} {hook}" for hook in hooks for number in (1, 2)]


class Moments(Component):
    """Records what the hooks see of the model."""

    seen: dict[str, Any] = Field(default_factory=dict)
    positions: list[int] = Field(default_factory=list)
    steps: list[int] = Field(default_factory=list)
    epochs: list[tuple[int, bool]] = Field(default_factory=list)

    def _weight(self, ctx: ClientContext) -> Tensor:
        return ctx.model.head.weight.detach().clone()

    def begin(self, ctx: ClientContext) -> None:
        self.seen["begin"] = self._weight(ctx)
        assert ctx.update == {}

    def gradient(self, ctx: ClientContext, batch: Batch) -> None:
        self.seen["gradient"] = self._weight(ctx)
        assert ctx.model.head.weight.grad is not None
        self.seen["its value"] = ctx.model.head.weight.grad.clone()

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        self.seen["after_step"] = self._weight(ctx)
        self.steps.append(ctx.steps)
        self.epochs.append((ctx.epoch, ctx.last_epoch))
        self.positions.extend(batch.index.tolist())
        assert torch.equal(ctx.data.batch(batch.index)[1], batch.y)
        # the features of the forward pass, i.e. of the weights before the step
        assert torch.allclose(batch.features @ self.seen["gradient"].T + self.seen["bias"], batch.logits, atol=1e-5)

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        assert ctx.model.head.bias is not None
        self.seen["bias"] = ctx.model.head.bias.detach().clone()
        return logits

    def after_epoch(self, ctx: ClientContext) -> None:
        if ctx.last_epoch:
            with torch.no_grad():
                ctx.model.head.weight += 1  # the last chance to change the model

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        self.seen["update"] = clone(ctx.update)
        return {"head": WeightedSum.of({"w": ctx.update["2.weight"]}, 2)}


def test_what_hooks_see() -> None:
    moments = Moments()
    bench = Bench([moments])
    result = bench.trainer.train(bench.plan(how=local(epochs=1, batch_size=10)), 0, toy_data(10), {})
    assert torch.equal(moments.seen["begin"], bench.start["2.weight"])
    assert torch.equal(moments.seen["gradient"], moments.seen["begin"])
    expected = moments.seen["gradient"] - 0.1 * moments.seen["its value"]
    assert torch.allclose(moments.seen["after_step"], expected, atol=1e-7)
    assert torch.allclose(moments.seen["update"]["2.weight"], moments.seen["after_step"] + 1 - moments.seen["begin"])
    assert torch.equal(result.contribution["moments/head"].tensors["w"], 2 * moments.seen["update"]["2.weight"])
    assert torch.allclose(update_of(result)["2.weight"], moments.seen["update"]["2.weight"], atol=1e-6)


def test_every_epoch_passes_over_every_sample_once() -> None:
    moments = Moments()
    bench = Bench([moments])
    result = bench.trainer.train(bench.plan(), 0, toy_data(10), {})
    assert sorted(moments.positions[:10]) == sorted(moments.positions[10:]) == list(range(10))
    assert moments.positions[:10] != moments.positions[10:]
    assert moments.steps == [1, 2, 3, 4, 5, 6]
    assert moments.epochs == [(0, False)] * 3 + [(1, True)] * 3
    assert (result.steps, result.sample_steps) == (6, 20)


def test_plain_training_equals_torch_written_out() -> None:
    """Two epochs of SGD with momentum and weight decay on one batch per epoch, by an independent few lines."""
    bench, data, how = Bench(), toy_data(6), local(batch_size=6, momentum=0.9, weight_decay=0.01)
    result = bench.trainer.train(bench.plan(how=how), 0, data, {})
    module = toy_network().module
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for _ in range(2):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(data.inputs), data.labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    for name, value in module.state_dict().items():
        assert torch.allclose(update_of(result)[name], value - bench.start[name], atol=1e-6)
    assert result.loss == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert result.contribution["fedavg/model"].weight.item() == 6


def test_the_optimisers_memory_does_not_pass_from_client_to_client() -> None:
    how = local(momentum=0.9)
    bench = Bench()
    alone = bench.trainer.train(bench.plan(how=how), 1, toy_data(8), {})
    bench.trainer.train(bench.plan(how=how), 0, toy_data(12, seed=5), {})
    after_another = bench.trainer.train(bench.plan(how=how), 1, toy_data(8), {})
    assert all(torch.equal(update_of(alone)[name], value) for name, value in update_of(after_another).items())


def test_seed_round_and_client_choose_the_shuffling() -> None:
    def order(seed: int = 1, round: int = 0, client: int = 0) -> list[int]:
        moments = Moments()
        bench = Bench([moments])
        bench.trainer.train(bench.plan(round=round, seed=seed), client, toy_data(10), {})
        return moments.positions

    assert order() == order()
    assert len({tuple(o) for o in (order(), order(seed=2), order(round=1), order(client=1))}) == 4


def test_logits_and_loss_hooks_change_what_is_minimised() -> None:
    class Colder(Component):
        name = "colder"

        def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
            return logits * 0.5

        def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
            return loss + 0.1 * batch.features.square().mean()

    bench, data = Bench([Colder()]), toy_data(6)
    result = bench.trainer.train(bench.plan(how=local(epochs=1, batch_size=6)), 0, data, {})
    network = toy_network()
    features, logits = network(data.inputs)
    loss = nn.functional.cross_entropy(0.5 * logits, data.labels) + 0.1 * features.square().mean()
    gradients = torch.autograd.grad(loss, list(network.module.parameters()))
    for (name, _), gradient in zip(network.module.named_parameters(), gradients, strict=True):
        assert torch.allclose(update_of(result)[name], -0.1 * gradient, atol=1e-6)


def test_gradient_hooks_change_the_step() -> None:
    class Scale(Component):
        name = "scale"

        def gradient(self, ctx: ClientContext, batch: Batch) -> None:
            for parameter in ctx.model.module.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(3)

    how = local(epochs=1, batch_size=10)
    plain = update_of(Bench().trainer.train(Bench().plan(how=how), 0, toy_data(10), {}))
    scaled = update_of(Bench([Scale()]).trainer.train(Bench().plan(how=how), 0, toy_data(10), {}))
    assert all(torch.allclose(scaled[name], 3 * plain[name], atol=1e-6) for name in plain)


def test_a_torch_without_the_private_backward_function_trains_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert local_loop._engine_run_backward is not None
    first = Bench().trainer.train(Bench().plan(), 0, toy_data(), {})
    monkeypatch.setattr(local_loop, "_engine_run_backward", None)
    second = Bench().trainer.train(Bench().plan(), 0, toy_data(), {})
    assert all(torch.equal(update_of(first)[name], value) for name, value in update_of(second).items())


# -- errors -----------------------------------------------------------------------------------------------------------
class Broken(Component):
    hook: str
    error: Exception

    def _fail(self, hook: str, ctx: ClientContext) -> None:
        if hook == self.hook and (hook != "after_step" or ctx.steps == 5):
            raise self.error

    def begin(self, ctx: ClientContext) -> None:
        self._fail("begin", ctx)

    def after_step(self, ctx: ClientContext, batch: Batch) -> None:
        self._fail("after_step", ctx)

    def after_epoch(self, ctx: ClientContext) -> None:
        self._fail("after_epoch", ctx)

    def contribute(self, ctx: ClientContext) -> Mapping[str, WeightedSum]:
        self._fail("contribute", ctx)
        return {}


@pytest.mark.parametrize(
    ("hook", "stage"),
    [
        ("begin", "begin"),
        ("after_step", "local training (epoch 2, batch 2)"),
        ("after_epoch", "after epoch"),
        ("contribute", "building the contribution"),
    ],
)
def test_an_error_in_a_hook_names_client_round_and_stage(hook: str, stage: str) -> None:
    bench = Bench([Broken(hook=hook, error=ZeroDivisionError("oh no"))])
    with pytest.raises(ClientError) as caught:
        bench.trainer.train(bench.plan(round=6), 42, toy_data(10), {})
    error = caught.value
    assert (error.client, error.round, error.stage) == (42, 7, stage)
    place = r"\(test_client_loop\.py, line \d+, in _fail\)"
    assert re.fullmatch(rf"client 42, round 7, {re.escape(stage)}: ZeroDivisionError: oh no {place}", str(error))
    assert isinstance(error.__cause__, ZeroDivisionError), "the real traceback must not be lost"


class WrongShape(Component):
    """Returns a loss of each sample where there must be one number, or logits with a dimension too many."""

    name = "wrong-shape"
    hook: str

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        return loss + batch.features.mean(-1) if self.hook == "loss" else loss

    def logits(self, ctx: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        return logits.unsqueeze(0) if self.hook == "logits" else logits


@pytest.mark.parametrize(("hook", "advice"), [("loss", "the loss as one number"), ("logits", "logits of shape")])
def test_shapes_that_torch_would_broadcast_are_refused(hook: str, advice: str) -> None:
    bench = Bench([WrongShape(hook=hook)])
    for samples in (10, 1):  # also where the batch has one sample
        with pytest.raises(ClientError, match=rf"'wrong-shape': `{hook}` returned a tensor of shape .*return {advice}"):
            bench.trainer.train(bench.plan(), 0, toy_data(samples), {})


@pytest.mark.parametrize(("hook", "advice"), [("loss", "the loss as one number"), ("logits", "logits of shape")])
def test_a_hook_without_return_is_refused(hook: str, advice: str) -> None:
    def forgetful(self: object, ctx: ClientContext, batch: Batch, value: Tensor) -> None: ...

    forgetful.__name__ = hook
    bench = Bench([type("Forgetful", (Component,), {hook: forgetful, "__module__": __name__})()])
    with pytest.raises(ClientError, match=f"component 'forgetful': `{hook}` returned None; return {advice}"):
        bench.trainer.train(bench.plan(), 0, toy_data(10), {})


def test_an_error_of_fedfa_itself_keeps_its_message_and_gains_client_round_and_stage() -> None:
    bench = Bench([Broken(hook="begin", error=ConfigError("choose something else"))])
    with pytest.raises(ClientError, match=r"^client 0, round 1, begin: choose something else$"):
        bench.trainer.train(bench.plan(), 0, toy_data(10), {})


def test_training_that_diverges_names_client_round_and_what_to_lower() -> None:
    bench = Bench()
    with pytest.raises(ClientError, match=r"client 3, round 2, local training: .*not finite.*local\.lr \(now 1e\+30\)"):
        bench.trainer.train(bench.plan(round=1, how=local(lr=1e30)), 3, toy_data(10), {})


def test_data_that_do_not_fit_the_network_name_the_batch() -> None:
    bench = Bench(network=SplitModel.of(nn.Sequential(nn.Linear(WIDTH + 1, CLASSES))))
    with pytest.raises(ClientError, match=r"client 0, round 1, local training \(epoch 1, batch 1\): RuntimeError"):
        bench.trainer.train(bench.plan(), 0, toy_data(10), {})


def test_the_error_can_be_sent_from_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(ClientError(3, 2, "begin", "oh no")))
    assert (error.client, error.round, error.stage, error.problem) == (3, 2, "begin", "oh no")
    assert str(error) == "client 3, round 2, begin: oh no"


def test_a_client_can_train_after_another_has_failed() -> None:
    bench = Bench()
    expected = update_of(bench.trainer.train(bench.plan(), 1, toy_data(8), {}))
    with pytest.raises(ClientError):
        bench.trainer.train(bench.plan(how=local(lr=1e30)), 0, toy_data(10), {})
    again = update_of(bench.trainer.train(bench.plan(), 1, toy_data(8), {}))
    assert all(torch.equal(expected[name], value) for name, value in again.items())


# -- client state ----------------------------------------------------------------------------------------------------
class Counter(Component):
    """Keeps a number and changes it in place."""

    name = "counter"

    def begin(self, ctx: ClientContext) -> None:
        ctx.client_state.setdefault(self.name, {"rounds": torch.zeros(1)})["rounds"].add_(1)


def test_client_state_is_handed_over_and_never_changed_in_place() -> None:
    bench = Bench([Counter()])
    first = bench.trainer.train(bench.plan(), 0, toy_data(4), {})
    assert first.client_state["counter"]["rounds"].item() == 1
    before: ComponentTensors = {"counter": {"rounds": torch.tensor([7.0])}, "other": {"x": torch.ones(2)}}
    second = bench.trainer.train(bench.plan(), 0, toy_data(4), before)
    assert second.client_state["counter"]["rounds"].item() == 8
    assert torch.equal(second.client_state["other"]["x"], torch.ones(2))
    assert before["counter"]["rounds"].item() == 7
    assert before.keys() == {"counter", "other"}


def test_methods_without_client_state_store_none() -> None:
    assert Bench().trainer.train(Bench().plan(), 0, toy_data(4), {}).client_state == {}


def test_the_plan_is_not_changed() -> None:
    bench = Bench([Counter()], toy_network(nn.BatchNorm1d(5)))
    plan = bench.plan(broadcast={"counter": {"x": torch.ones(2)}})
    before = clone(plan.model)
    bench.trainer.train(plan, 0, toy_data(8), {})
    assert all(torch.equal(before[name], value) for name, value in plan.model.items())
    assert torch.equal(plan.broadcast["counter"]["x"], torch.ones(2))


# -- roles and buffers ------------------------------------------------------------------------------------------------
BUFFERS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_buffers_are_averaged_like_weights() -> None:
    bench = Bench(network=toy_network(nn.BatchNorm1d(5)))
    result = bench.trainer.train(bench.plan(), 0, toy_data(8), {})
    assert update_of(result).keys() == bench.start.keys() > BUFFERS
    assert update_of(result)["1.num_batches_tracked"].item() == 4  # 2 epochs of 2 batches
    assert update_of(result)["1.running_mean"].abs().sum() > 0
    assert result.client_state == {}


def test_local_buffers_stay_with_the_client_and_come_back() -> None:
    bench = Bench(network=toy_network(nn.BatchNorm1d(5)), local_buffers=True)
    first = bench.trainer.train(bench.plan(), 0, toy_data(8), {})
    assert not BUFFERS & update_of(first).keys()
    assert first.client_state.keys() == {MODEL}
    assert first.client_state[MODEL].keys() == BUFFERS
    assert first.client_state[MODEL]["1.num_batches_tracked"].item() == 4
    assert first.client_state[MODEL]["1.num_batches_tracked"].dtype == torch.int64
    bench.trainer.train(bench.plan(), 1, toy_data(12, seed=9), {})  # another client in between leaves no trace
    second = bench.trainer.train(bench.plan(round=1), 0, toy_data(8), first.client_state)
    assert second.client_state[MODEL]["1.num_batches_tracked"].item() == 8
    assert first.client_state[MODEL]["1.num_batches_tracked"].item() == 4


class Roles(Component):
    wanted: dict[str, Role]

    def roles(self, task: Task) -> Mapping[str, Role]:
        return self.wanted


def test_local_weights_are_trained_kept_and_not_sent() -> None:
    bench = Bench([Roles(wanted={"2.weight": Role.LOCAL})])
    first = bench.trainer.train(bench.plan(), 0, toy_data(8), {})
    assert "2.weight" not in update_of(first)
    own = first.client_state[MODEL]["2.weight"]
    assert not torch.equal(own, bench.start["2.weight"])
    second = bench.trainer.train(bench.plan(how=local(lr=1e-12)), 0, toy_data(8), first.client_state)
    assert torch.allclose(second.client_state[MODEL]["2.weight"], own)


def test_frozen_weights_are_neither_trained_nor_sent() -> None:
    bench = Bench([Roles(wanted={"0.weight": Role.FROZEN})])
    result = bench.trainer.train(bench.plan(how=local(weight_decay=0.1, momentum=0.9)), 0, toy_data(8), {})
    assert update_of(result).keys() == {"0.bias", "2.weight", "2.bias"}
    assert torch.equal(bench.network.state()["0.weight"], bench.start["0.weight"])
    assert result.client_state == {}


def test_weights_that_the_author_of_a_network_froze_stay_frozen() -> None:
    network = toy_network()
    network.module.get_parameter("0.weight").requires_grad_(False)
    bench = Bench(network=network)
    bench.trainer.train(bench.plan(), 0, toy_data(8), {})
    assert torch.equal(bench.network.state()["0.weight"], bench.start["0.weight"])


def test_batch_norm_with_a_batch_of_one_sample_is_a_clear_error() -> None:
    bench = Bench(network=toy_network(nn.BatchNorm1d(5)))
    with pytest.raises(
        ClientError, match=r"client 5, round 1, local training \(epoch 1, batch 3\): .*more than 1 value"
    ):
        bench.trainer.train(bench.plan(), 5, toy_data(9), {})


def test_drop_last_leaves_out_the_incomplete_batch() -> None:
    bench = Bench(network=toy_network(nn.BatchNorm1d(5)))
    result = bench.trainer.train(bench.plan(how=local(drop_last=True)), 5, toy_data(9), {})
    assert (result.steps, result.sample_steps) == (4, 16)
    assert update_of(result)["1.num_batches_tracked"].item() == 4


def test_drop_last_with_fewer_samples_than_a_batch_trains_nothing() -> None:
    bench = Bench()
    result = bench.trainer.train(bench.plan(how=local(drop_last=True)), 0, toy_data(3), {})
    assert result.steps == 0
    assert all(not value.any() for value in update_of(result).values())


def test_dropout_draws_from_a_stream_of_its_own() -> None:
    def train(noise: int, client: int = 0) -> Tensors:
        bench = Bench(network=toy_network(nn.Dropout(0.5)))
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        result = bench.trainer.train(bench.plan(how=local(batch_size=10)), client, toy_data(10), {})
        assert torch.equal(torch.get_rng_state(), before)
        return update_of(result)

    once, again, other = train(noise=1), train(noise=2), train(noise=1, client=1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not torch.equal(once["3.weight"], other["3.weight"])
