"""What one member can do is bounded: it is left out or limited, and the run goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import given
from hypothesis import strategies as st

from fedfa.errors import ConfigError, FederationError
from fedfa.experiment.files import load_tensors
from fedfa.flower.checks import limit_share, norm_of_mean
from fedfa.flower.messages import SiteEvaluation, decode_announcement, pack, unpack
from fedfa.flower.operate.keys import make_node_key, site_keys
from fedfa.flower.site_evaluations import combine, limit_counts
from fedfa.learning.aggregate import Aggregate, WeightedSum
from fedfa.learning.context import LocalTraining
from fedfa.learning.evaluate import Evaluation
from tests.experiment.run_toys import timeless
from tests.flower.loopback import LoopbackGrid, Tamper, round_and_client
from tests.flower.small_sites import SITES, serve, small_grid
from tests.flower.test_failing_sites import change_announcement, node_of

BAD_SITE = 2


def poisoning(value: float, weight: float | None, rounds: set[int], group: str = "anchors/anchors") -> Tamper:
    """Site 2 sends this value in one group, with this weight (None: its own)."""

    def tamper(asked: Message, reply: Message) -> Message:
        now = round_and_client(asked)
        if now is not None and now[0] in rounds and now[1] == BAD_SITE:
            tensors = unpack(reply.content.array_records["contribution"])
            for name in [name for name in tensors if name.startswith(f"{group}:")]:
                tensors[name] = torch.full_like(tensors[name], value)
            if weight is not None:
                tensors[f"{group}#weight"] = torch.full_like(tensors[f"{group}#weight"], weight)
            reply.content["contribution"] = pack(tensors)
        return reply

    return tamper


@pytest.mark.parametrize(
    ("value", "weight", "problem"), [(1e30, 0.0, "has sums without weight"), (1e30, None, "norm of anchors/anchors")]
)
def test_poisoned_anchors_are_rejected(
    value: float, weight: float | None, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were checkpointed, and then every honest site was rejected for ever."""
    grid = small_grid(tmp_path, poisoning(value, weight, {1}))
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, algorithm="fedfa", rounds=3)
    assert problem in caplog.text
    assert [sorted(record["cohort"]) for record in timeless(flower)] == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    assert all(bool(torch.isfinite(value).all()) for value in load_tensors(flower / "server.safetensors").values())


def test_a_round_that_makes_every_site_fail_is_rolled_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without limits the poison of round 2 gets into the checkpoint; from there no site can train."""
    calls: list[int] = []

    def once(asked: Message, reply: Message) -> Message | None:
        if round_and_client(asked) == (1, BAD_SITE):
            calls.append(1)
        return poisoning(3e38, None, {1}, "fedavg/model")(asked, reply) if len(calls) == 1 else reply

    rules: dict[str, Any] = {"federation__norm_limit": math.inf, "federation__attempts": 1}
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", small_grid(tmp_path, once), algorithm="fedfa", rounds=4, **rules)
    assert "rolling back to the checkpoint of round 1" in caplog.text
    honest = serve(tmp_path / "honest", small_grid(tmp_path / "other"), algorithm="fedfa", rounds=4)
    for name in ("model.safetensors", "server.safetensors"):
        mine, expected = load_tensors(flower / name), load_tensors(honest / name)
        assert all(torch.equal(mine[key], expected[key]) for key in expected)
    assert [record["round"] for record in timeless(flower)] == [1, 2, 3, 4]


def test_a_member_that_always_makes_every_site_fail_ends_the_run_in_words(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"federation__norm_limit": math.inf, "federation__attempts": 1}
    with pytest.raises(FederationError, match=r"cannot train from its state|0 of 4 sites sent a valid update"):
        serve(
            tmp_path / "run", small_grid(tmp_path, poisoning(3e38, None, {0, 1, 2, 3}, "fedavg/model")),
            algorithm="fedfa", rounds=4, **rules,
        )  # fmt: skip


# -- weights ----------------------------------------------------------------------------------------------------------
@given(
    st.lists(st.integers(1, 2**40), min_size=3, max_size=6), st.floats(0.2, 0.99), st.integers(0, 5), st.floats(-5, 5)
)
def test_no_site_has_more_than_its_share_and_means_stay(
    sizes: list[int], share: float, number: int, value: float
) -> None:
    number %= len(sizes)
    sent = {"a/b": WeightedSum.of({"x": torch.tensor([value], dtype=torch.float64)}, sizes[number])}
    others = sum(sizes) - sizes[number]
    limited, factor = limit_share(sent, sizes[number], others, share)
    weight = float(limited["a/b"].weight)
    assert weight / (weight + others) <= share * (1 + 1e-5) or sizes[number] / sum(sizes) <= share
    assert (factor == 1.0) == (sizes[number] <= others * share / (1 - share))
    assert norm_of_mean(limited["a/b"]) == pytest.approx(norm_of_mean(sent["a/b"]), rel=1e-5)


def test_a_claimed_number_of_samples_does_not_decide_the_mean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Site 3 claims 2^39 samples and sends an update of its own choice with that weight: it gets half of the mean."""
    claimed = 2**39

    def boast(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "query.site" and decode_announcement(reply.content).site == 3:
            reply.content.config_records["site"]["samples"] = claimed
        if round_and_client(asked) == (0, 3):
            steps = LocalTraining(epochs=1, batch_size=16).work_on(claimed)
            reply.content.config_records["result"].update({"steps": steps[0], "sample_steps": steps[1]})
            tensors = unpack(reply.content.array_records["contribution"])
            own = float(tensors["fedavg/model#weight"])
            for name in [name for name in tensors if name.startswith("fedavg/model")]:
                tensors[name] = tensors[name] * (claimed / own)
            reply.content["contribution"] = pack(tensors)
        return reply

    seen: list[float] = []
    add = Aggregate.add

    def recording(self: Aggregate, contribution: dict[str, WeightedSum], member: int) -> None:
        seen.append(float(contribution["fedavg/model"].weight))
        add(self, contribution, member)

    with caplog.at_level(logging.WARNING, "fedfa"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Aggregate, "add", recording)
        flower = serve(tmp_path / "run", small_grid(tmp_path, boast), algorithm="fedavg", rounds=1)
    assert "site 3 has 549755813888 samples" in caplog.text
    assert max(seen) == pytest.approx(sum(seen) / 2)
    assert list(timeless(flower)[0]["federation"]["limited"]) == ["3"]


# -- announcements ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"site": 10**9, "sites": 10**9 + 1}, "it claims to be site 1000000000, but there are 4"),
        ({"sites": SITES + 1}, r"it says there are 5 sites"),
        ({"input_shape": [5]}, "it has inputs of shape"),
    ],
)
def test_a_node_that_announces_nonsense_first_is_left_out(
    change: dict[str, Any], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to stop the run at its start, or to have the honest sites refused."""
    grid = small_grid(tmp_path, change_announcement(**change))
    nodes = sorted(grid.sites, key=lambda node: -grid.sites[node]["partition-id"])
    grid.sites = {node: grid.sites[node] for node in nodes}  # the nonsense is heard first
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, rounds=1)
    assert f"node {nodes[0]} is refused: {problem}" in caplog.text
    assert sorted(timeless(flower)[0]["cohort"]) == [0, 1, 2]


class KeyedGrid(LoopbackGrid):
    """Nodes with public keys, as Flower lists them."""

    keys: Mapping[int, bytes]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.sites]


def test_a_sites_number_is_bound_to_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A registered node that claims another's number, first, is refused; the site itself takes part."""
    for site in range(SITES):
        make_node_key(tmp_path / "keys", f"site{site}")
    file = tmp_path / "keys" / "sites.toml"
    file.write_text("".join(f'{site} = "site{site}.pub"\n' for site in range(SITES)))
    plain = small_grid(tmp_path)
    thief = 4242
    grid = KeyedGrid({thief: dict(plain.sites[node_of(plain, 0)]), **plain.sites}, {}, plain.app)
    keys = site_keys(file)
    grid.keys = {node_of(plain, site): keys[site] for site in range(SITES)} | {thief: keys[3]}
    with caplog.at_level(logging.WARNING, "fedfa"):
        flower = serve(tmp_path / "run", grid, rounds=1, federation__site_keys=str(file))
    assert f"node {thief} is refused: it claims to be site 0, whose key is another" in caplog.text
    assert sorted(timeless(flower)[0]["cohort"]) == [0, 1, 2, 3]
    asked = {message.metadata.dst_node_id for message in grid.messages if message.metadata.message_type == "train"}
    assert thief not in asked


@pytest.mark.parametrize(
    ("text", "problem"),
    [('0 = "none.pub"\n', "not the public key"), ('0 = "a.pub"\n1 = "a.pub"\n', "same key"), ('x = "a.pub"\n', "x =")],
)
def test_a_file_of_keys_that_cannot_be_used_is_an_error(text: str, problem: str, tmp_path: Path) -> None:
    make_node_key(tmp_path, "a")
    (tmp_path / "sites.toml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        site_keys(tmp_path / "sites.toml")


# -- evaluations ------------------------------------------------------------------------------------------------------
def boasting(count: int) -> Tamper:
    """Site 3 reports that it has tested this many samples, all of them right."""

    def tamper(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "evaluate" and asked.content.config_records["plan"]["client"] == 3:
            values = reply.content.config_records["evaluation"]
            values.update({"accuracy": 1.0, "class_accuracy": [1.0] * 4, "class_counts": [count] * 4})
        return reply

    return tamper


def test_one_site_cannot_falsify_the_accuracy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules: dict[str, Any] = {"federation__evaluation": "sites", "algorithm": "fedavg", "local__lr": 1e-6, "rounds": 1}
    honest = timeless(serve(tmp_path / "honest", small_grid(tmp_path), **rules))[0]["accuracy"]
    with caplog.at_level(logging.WARNING, "fedfa"):
        absurd = timeless(serve(tmp_path / "absurd", small_grid(tmp_path, boasting(2**60)), **rules))[0]
        large = timeless(serve(tmp_path / "large", small_grid(tmp_path, boasting(2**30)), **rules))[0]
    assert "(site 3) is left out: the evaluation's counts are not numbers of samples" in caplog.text
    assert "3" not in absurd["federation"]["site_accuracy"]
    assert "site 3 reports 4294967296 test samples, more than its share" in caplog.text
    assert large["accuracy"] <= 0.5 + honest / 2 + 0.05 < 0.9
    assert large["federation"]["site_accuracy"]["3"] == 1.0


def test_an_accuracy_that_stands_out_is_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules: dict[str, Any] = {"federation__evaluation": "both", "algorithm": "fedavg", "local__lr": 1e-6, "rounds": 1}
    with caplog.at_level(logging.WARNING, "fedfa"):
        serve(tmp_path / "run", small_grid(tmp_path, boasting(3)), **rules)
    assert "site 3 reports an accuracy of 100.00 %" in caplog.text


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=5), st.floats(0.25, 0.9))
def test_test_samples_are_bounded_by_their_share(counts: list[int], share: float) -> None:
    each = [SiteEvaluation(n, Evaluation(1.0, 0.5, [1.0], {}), (count,)) for n, count in enumerate(counts)]
    for one in each:
        others = sum(counts) - one.class_counts[0]
        assert sum(limit_counts(one, each, share).class_counts) <= max(math.ceil(others * share / (1 - share)), 1)
    assert combine([limit_counts(one, each, share) for one in each]).accuracy == 1.0
