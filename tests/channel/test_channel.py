"""Trainings behind a channel: exact bytes, what stays exact, error feedback as client state, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfa.channel.channel import CHANNEL
from fedfa.data import DataSet
from fedfa.errors import AlgorithmError, ConfigError
from fedfa.experiment.config import Config
from fedfa.experiment.experiment import Experiment
from fedfa.experiment.run import run
from fedfa.learning.client import ClientResult
from fedfa.learning.tensors import ComponentTensors
from tests.experiment.run_toys import assert_same_run, equal_tensors, small


def config(algorithm: str = "fedavg", **more: Any) -> Config:
    return small(algorithm, **{"engine": {"workers": 1, "execution": "each"}, **more})


def trained(data: DataSet, algorithm: str = "fedavg", **more: Any) -> Experiment:
    experiment = Experiment.from_config(config(algorithm, **more), data=data)
    for _ in experiment.rounds(progress=False):
        pass
    return experiment


SIZES = (6 * 8, 8, 8 * 4, 4)
"""Numbers in the tensors of the network."""


@pytest.mark.parametrize(
    ("channel", "up", "down"),
    [
        ({"up": "float16"}, 2 * 92, 4 * 92),
        ({"down": "float16"}, 4 * 92, 2 * 92),
        ({"up": "int8", "down": "int4"}, 92 + 4 * 4, 46 + 4 * 4),
        ({"up": "int1"}, 6 + 1 + 4 + 1 + 4 * 4, 4 * 92),
        ({"up": "topk", "share": 0.1}, 8 * (5 + 1 + 4 + 1), 4 * 92),
        ({"up": "randomk", "share": 0.1}, 4 * (5 + 1 + 4 + 1) + 8 * 4, 4 * 92),
        ({"up": "sign"}, 6 + 1 + 4 + 1 + 4 * 4, 4 * 92),
    ],
)
def test_bytes_of_a_round(blobs: DataSet, channel: dict[str, Any], up: int, down: int) -> None:
    """48 + 8 + 32 + 4 = 92 numbers in four tensors, each with its own scale (or key), and 4 bytes for the weight."""
    assert sum(SIZES) == 92
    (record,) = trained(blobs, channel=channel, rounds=1).records
    assert record["bytes_up"] == 4 * (up + 4)
    assert record["bytes_down"] == 4 * down


def test_the_clock_sees_the_compressed_bytes(blobs: DataSet) -> None:
    """Equal devices at 100 B/s: 80 samples at 100 a second, and the record's own bytes."""
    fleet = {"devices": "equal", "down": 100.0, "up": 100.0}
    (record,) = trained(blobs, channel={"up": "int8", "down": "float16"}, fleet=fleet, rounds=1).records
    assert record.time == pytest.approx((2 * 92) / 100 + 0.8 + (92 + 16 + 4) / 100)


@pytest.mark.parametrize("policy", [None, {"policy": "fedbuff", "buffer": 2}, {"policy": "fedasync"}])
def test_workers_and_resume_change_no_bit(blobs: DataSet, policy: dict[str, Any] | None, tmp_path: Path) -> None:
    fleet = {} if policy is None else {"fleet": {"devices": "lognormal", **policy}}
    channel = {"channel": {"up": "topk", "share": 0.2, "down": "int8"}}
    planned = config("fedfa", **channel, **fleet, rounds=5, checkpoint={"every": 2})
    run(planned, tmp_path / "whole", data=blobs)

    def kill(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(planned, tmp_path / "killed", data=blobs, watch=kill)
    two = config("fedfa", **channel, **fleet, rounds=5, checkpoint={"every": 2}, engine={"workers": 2})
    run(two, tmp_path / "killed", data=blobs, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


class Recording(Experiment):
    """Keeps what clients made."""

    made: list[ClientResult]

    def engine(self) -> Any:
        engine, self.made = super().engine(), []
        train = engine.train

        def recorded(plan: Any, clients: Any, load: Any) -> Any:
            for result in train(plan, clients, load):
                self.made.append(result)
                yield result

        engine.train = recorded  # type: ignore[method-assign, assignment]
        return engine


def received(experiment: Experiment) -> tuple[ClientResult, ClientResult]:
    """A client's result before and behind the channel."""
    assert isinstance(experiment, Recording)
    next(iter(experiment.rounds(1, progress=False)))
    channel = experiment.training.channel
    assert channel is not None
    before = experiment.made[0]
    plan = experiment.training.plan(experiment.training.init(), experiment.config.local)

    def train(*_: object) -> Any:
        yield before

    (after,) = channel.carry(train)(plan, [before.client], lambda _: {})
    return before, after


@pytest.mark.parametrize("up", ["sign", "topk", "randomk"])
def test_error_feedback_loses_nothing(blobs: DataSet, up: str) -> None:
    """What arrived plus what is kept is what was to be sent."""
    before, after = received(Recording.from_config(config("fedavg", channel={"up": up}), data=blobs))
    sent, arrived = before.contribution["fedavg/model"], after.contribution["fedavg/model"]
    for name, value in sent.tensors.items():
        error = after.client_state[CHANNEL][f"fedavg/model:{name}"]
        torch.testing.assert_close(arrived.tensors[name] / arrived.weight + error, value / sent.weight)
        assert not torch.equal(arrived.tensors[name], value)
    assert torch.equal(arrived.weight, sent.weight)


def test_the_error_is_added_to_the_next_update(blobs: DataSet) -> None:
    """With an error e from before, top-k sends from Δ + e: here one entry of e outweighs everything."""
    experiment = Recording.from_config(config("fedavg", channel={"up": "topk", "share": 0.01}), data=blobs)
    before, _ = received(experiment)
    name = next(iter(before.contribution["fedavg/model"].tensors))
    error = torch.zeros_like(before.contribution["fedavg/model"].tensors[name])
    error.view(-1)[3] = 100.0
    kept: ComponentTensors = {CHANNEL: {f"fedavg/model:{name}": error}}
    channel = experiment.training.channel
    assert channel is not None
    plan = experiment.training.plan(experiment.state, experiment.config.local)
    (after,) = channel.carry(lambda *_: iter([before]))(plan, [before.client], lambda _: kept)
    values = after.contribution["fedavg/model"].tensors[name].view(-1) / before.contribution["fedavg/model"].weight
    assert values.nonzero().flatten().tolist() == [3]
    assert values[3] == pytest.approx(100, abs=5)


def test_anchors_are_quantised_but_never_thinned_out(blobs: DataSet) -> None:
    group = "anchors/anchors"
    before, after = received(Recording.from_config(config("fedfa", channel={"up": "topk"}), data=blobs))
    for name, value in before.contribution[group].tensors.items():
        assert torch.equal(after.contribution[group].tensors[name], value)
    before, after = received(Recording.from_config(config("fedfa", channel={"up": "int8"}), data=blobs))
    for name, value in before.contribution[group].tensors.items():
        assert not torch.equal(after.contribution[group].tensors[name], value)
        torch.testing.assert_close(
            after.contribution[group].tensors[name], value, rtol=0, atol=1.01 * float(value.abs().max()) / 127
        )


def test_statistics_and_counters_arrive_as_they_are(blobs: DataSet) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    planned = config("fedavg", channel={"up": "int2", "down": "int2"})
    experiment = Recording.from_config(planned, model=network, data=blobs)
    before, after = received(experiment)
    sent, arrived = (result.contribution["fedavg/model"].tensors for result in (before, after))
    for name in sent:
        assert torch.equal(sent[name], arrived[name]) == ("running" in name or "num_batches" in name), name


def test_control_variates_stay_exact(blobs: DataSet) -> None:
    before, after = received(Recording.from_config(config("scaffold", channel={"up": "int4"}), data=blobs))
    assert equal_tensors(
        before.contribution["scaffold/control"].tensors, after.contribution["scaffold/control"].tensors
    )
    assert not equal_tensors(
        before.contribution["scaffold/model"].tensors, after.contribution["scaffold/model"].tensors
    )


def test_training_survives_compression(blobs: DataSet) -> None:
    """Blobs are learnt behind every codec; without the channel they are learnt to 100 %."""
    for channel in ({"up": "int4", "down": "int8"}, {"up": "topk", "share": 0.1}, {"up": "sign"}):
        records = trained(blobs, "fedavg", channel=channel, rounds=12, local={"lr": 0.2}).records
        assert records[-1].accuracy is not None
        assert records[-1].accuracy > 0.8, channel


def test_refusals(blobs: DataSet) -> None:
    with pytest.raises(AlgorithmError, match=r"'feddyn' cannot be combined with channel\.up = 'int8'"):
        Experiment.from_config(config("feddyn", channel={"up": "int8"}), data=blobs)
    Experiment.from_config(config("feddyn", channel={"down": "int8"}), data=blobs)
    with pytest.raises(ConfigError, match=r"channel\.down"):
        config(channel={"down": "topk"})
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        config(channel={"up": "int9"})
