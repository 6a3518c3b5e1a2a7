"""Messages are decoded bit for bit; malformed ones are rejected before memory is allocated."""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given
from hypothesis import strategies as st

from fedfa.flower.messages import (
    PACKED,
    Announcement,
    BadMessageError,
    Instruction,
    SiteEvaluation,
    SiteResult,
    decode_announcement,
    decode_evaluation,
    decode_instruction,
    decode_plan,
    decode_result,
    encode_announcement,
    encode_evaluation,
    encode_instruction,
    encode_result,
    encode_tensors,
    pack,
    printable,
    unpack,
)
from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.context import LocalTraining
from fedfa.learning.evaluate import Evaluation
from tests.experiment.run_toys import equal_tensors
from tests.flower.loopback import content_through_the_wire, enter_run

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def packed(data: bytes) -> dict[str, Array]:
    return {PACKED: Array("uint8", (len(data),), PACKED, data)}


def with_manifest(manifest: object, elements: bytes = b"") -> dict[str, Array]:
    head = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    return packed(struct.pack("<Q", len(head)) + head + elements)


names = st.text(min_size=1, max_size=12).filter(lambda name: "\x00" not in name)
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    raw = draw(st.binary(min_size=8 * math.prod(shape), max_size=8 * math.prod(shape)))
    whole = torch.frombuffer(bytearray(raw), dtype=torch.int64) if raw else torch.zeros(0, dtype=torch.int64)
    if dtype.is_floating_point:  # any pattern of bits, NaN and infinities too
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        value = whole.to(bits).view(dtype)
    else:
        value = whole.to(dtype)
    value = value.reshape(shape)
    return value.T if len(shape) == 2 and draw(st.booleans()) else value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat_a, flat_b = (value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value for value in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat_a, flat_b)


@given(st.dictionaries(names, tensors(), max_size=4))
def test_named_tensors_arrive_to_the_bit_through_flowers_own_serialisation(sent: dict[str, torch.Tensor]) -> None:
    content = content_through_the_wire(RecordDict({"a": pack(sent)}))
    arrived = unpack(content.array_records["a"])
    assert list(arrived) == list(sent)
    assert all(same_bits(arrived[name], value) for name, value in sent.items())


def test_a_message_has_as_many_of_flowers_objects_for_a_thousand_tensors_as_for_one() -> None:
    """Flower stores and sends each array as objects of its own, at some 50 ms each."""

    def objects(count: int) -> int:
        enter_run()
        model = {f"layer{number}": torch.full((1000 // count,), float(number)) for number in range(count)}
        message = Message(RecordDict(dict(encode_tensors(model, {"a": model}))), dst_node_id=1, message_type="train")
        return len(get_all_nested_objects(message))

    assert objects(1000) == objects(1)


def test_what_arrives_can_be_written_to_and_is_nobody_elses() -> None:
    record = pack({"a": torch.zeros(2)})
    unpack(record)["a"].add_(1)
    assert unpack(record)["a"].tolist() == [0, 0]


local_training = st.builds(
    LocalTraining,
    epochs=st.integers(1, 9),
    batch_size=st.integers(1, 99),
    lr=st.floats(1e-9, 10),
    momentum=st.floats(0, 0.99),
    weight_decay=st.floats(0, 1),
    drop_last=st.booleans(),
    steps=st.none() | st.integers(1, 50),
)


@given(
    local_training,
    st.integers(0, 10**6),
    st.booleans(),
    st.lists(st.integers(1, 9**9), max_size=3),
    st.dictionaries(
        st.sampled_from(["anchors", "scaffold"]), st.dictionaries(names, tensors(), min_size=1, max_size=2)
    ),
)
def test_a_plan_arrives(
    local: LocalTraining,
    number: int,
    final_pass: bool,
    versions: list[int],
    broadcast: dict[str, dict[str, torch.Tensor]],
) -> None:
    plan = RoundPlan(
        number, {"w": torch.randn(2)}, broadcast, local, seed=number + 1, rounds=number + 2, final_pass=final_pass
    )
    order = Instruction("ab" * 16, 3, 'rounds = 1\nname = "x"', {"network": "f00"}, tuple(versions), final_pass)
    content = RecordDict({**encode_tensors(plan.model, broadcast), "plan": encode_instruction(order, plan)})
    content = content_through_the_wire(content)
    arrived = decode_plan(content)
    assert decode_instruction(content) == order
    assert arrived.local == local
    assert (arrived.round, arrived.seed, arrived.rounds, arrived.final_pass) == (
        number,
        number + 1,
        number + 2,
        final_pass,
    )
    assert equal_tensors(arrived.model, plan.model)
    assert arrived.broadcast.keys() == broadcast.keys()
    assert all(same_bits(arrived.broadcast[p][n], t) for p, values in broadcast.items() for n, t in values.items())


def make_result(**more: object) -> SiteResult:
    contribution = {
        "fedavg/model": WeightedSum({"fc.weight": torch.randn(2, 3), "n:#/odd": torch.tensor(7)}, torch.tensor(5.0)),
        "anchors/anchors": WeightedSum({"last": torch.randn(4, 3)}, torch.tensor([[1.0], [0.0], [4.0], [0.0]])),
    }
    values = {
        "client": 2,
        "contribution": contribution,
        "client_state": {},
        "steps": 3,
        "sample_steps": 12,
        "loss": 0.25,
        "cpu_seconds": 0.5,
    }
    return SiteResult(ClientResult(**(values | more)), "ab" * 16, 4, True, False, {"train": 1.5})  # type: ignore[arg-type]  # of many types


@pytest.mark.parametrize("loss", [0.25, None])
def test_a_result_arrives(loss: float | None) -> None:
    sent = make_result(loss=loss)
    arrived = decode_result(content_through_the_wire(encode_result(sent)))
    assert (arrived.run, arrived.round, arrived.keeps, arrived.lost) == (sent.run, sent.round, sent.keeps, sent.lost)
    assert arrived.seconds == sent.seconds
    one, other = arrived.result, sent.result
    assert (one.client, one.steps, one.sample_steps, one.loss, one.cpu_seconds) == (2, 3, 12, loss, 0.5)
    assert one.contribution.keys() == other.contribution.keys()
    for group, entry in one.contribution.items():
        assert equal_tensors(entry.tensors, other.contribution[group].tensors)
        assert torch.equal(entry.weight, other.contribution[group].weight)


@given(st.integers(0, 9), st.none() | st.integers(10, 99), st.none() | st.lists(st.integers(1, 64), max_size=3))
def test_an_announcement_arrives(site: int, sites: int | None, shape: list[int] | None) -> None:
    samples = None if shape is None else 100
    sent = Announcement(site, sites, "1.2", samples, None if shape is None else tuple(shape))
    assert decode_announcement(content_through_the_wire(encode_announcement(sent))) == sent


def test_an_evaluation_arrives() -> None:
    sent = SiteEvaluation(1, Evaluation(0.5, 2.0, [0.5, None], {"a": 0.25}), (4, 0), (4,))
    assert decode_evaluation(content_through_the_wire(encode_evaluation(sent)), 2) == sent


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"accuracy": 1.5}, "between 0 and 1"),
        ({"accuracy": math.nan}, "between 0 and 1"),
        ({"class_accuracy": [0.5]}, "2 classes"),
        ({"class_counts": [-1, 2]}, "numbers of samples"),
        ({"class_counts": [0, 0]}, "numbers of samples"),
        ({"domain_counts": [8]}, "0 domains, but counts of 1"),
        ({"domains": ["a"], "domain_accuracy": [0.5], "domain_counts": [0]}, "numbers of samples"),
    ],
)
def test_an_implausible_evaluation_is_rejected(change: dict[str, object], problem: str) -> None:
    content = encode_evaluation(SiteEvaluation(1, Evaluation(0.5, 2.0, [0.5, 0.5], {}), (4, 4)))
    content.config_records["evaluation"].update(change)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(BadMessageError, match=problem):
        decode_evaluation(content, 2)


WHOLE = pack({"a": torch.zeros(4)})[PACKED].data


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (packed(b""), "struct.error|error: unpack"),
        (packed(b"\x80\x04\x95 a pickle"), "not valid"),
        (packed(WHOLE[:-1]), "15 bytes follow, not 16"),
        (packed(WHOLE + b"x"), "17 bytes follow, not 16"),
        (with_manifest([["a", "float32", [4 * 10**11, 1000]]], bytes(16)), "16 bytes follow, not 16000000000000"),
        (with_manifest([["a", "float32", [0, 2**70]]]), "not a list of sizes"),
        (with_manifest([["a", "float32", [0, 2**39, 2**39]]]), "not valid"),
        (with_manifest([["a", "float32", [-1, -4]]], bytes(16)), "not a list of sizes"),
        (with_manifest([["a", "float32", [True]]], bytes(4)), "not a list of sizes"),
        (with_manifest([["a", "object", [1]]], bytes(8)), "KeyError"),
        (with_manifest([["a", "uint8", [1]], ["a", "uint8", [1]]], bytes(2)), "occurs twice"),
        (with_manifest([[7, "uint8", [1]]], bytes(1)), "not text"),
        (with_manifest({"a": 1}), "not valid"),
        (with_manifest(b"[" * 100_000), "RecursionError|not valid"),
        ({"a": Array("float32", (1,), "numpy.ndarray", b"1234")}, "not packed"),
        ({PACKED: Array("uint8", (4,), "numpy.ndarray", b"1234")}, "not packed"),
        ({**packed(WHOLE), "b": packed(WHOLE)[PACKED]}, "not packed"),
        ({}, "not packed"),
    ],
)
def test_a_manifest_that_does_not_describe_its_bytes_is_rejected(record: dict[str, Array], problem: str) -> None:
    with pytest.raises(BadMessageError, match=problem):
        unpack(record)


@given(st.integers(0, len(WHOLE)), st.binary(min_size=1, max_size=4))
def test_damaged_bytes_are_either_rejected_or_decoded(place: int, put: bytes) -> None:
    with suppress(BadMessageError):
        unpack(packed(WHOLE[:place] + put + WHOLE[place + len(put) :]))


@given(st.text(max_size=2000))
def test_what_a_site_says_is_one_short_printable_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) < 300 * 10 + 40
    assert str(BadMessageError(text)) == shown


@pytest.mark.parametrize(
    ("record", "key", "value", "problem"),
    [
        ("result", "round", True, "round = True is not of type int"),
        ("result", "steps", "3", "steps"),
        ("result", "cpu_seconds", math.nan, "not a duration"),
        ("result", "cpu_seconds", -1.0, "not a duration"),
        ("result", "cpu_seconds", 1.7e308, "not a duration"),  # two of them would add up to infinity
        ("result", "loss", -1.7e308, "not a loss"),
        ("result", "run", 5, "run"),
    ],
)
def test_values_of_the_wrong_type_are_rejected(record: str, key: str, value: object, problem: str) -> None:
    content = encode_result(make_result())
    content.config_records[record][key] = value  # type: ignore[assignment]  # wrong on purpose
    with pytest.raises(BadMessageError, match=problem):
        decode_result(content)


def test_a_sum_without_weight_and_a_reply_without_contribution_are_rejected() -> None:
    content = encode_result(make_result())
    flat = unpack(content.array_records["contribution"])
    del flat["fedavg/model#weight"]
    content["contribution"] = pack(flat)
    with pytest.raises(BadMessageError, match="has no weight"):
        decode_result(content)
    stray = encode_result(make_result())
    stray["contribution"] = pack({"stray": torch.zeros(1)})
    with pytest.raises(BadMessageError, match="neither a sum nor a weight"):
        decode_result(stray)
    for empty in (RecordDict(), RecordDict({"result": ConfigRecord()}), RecordDict({"contribution": ArrayRecord()})):
        with pytest.raises(BadMessageError):
            decode_result(empty)


def test_records_and_stages_that_nobody_asked_for_are_not_kept() -> None:
    content = encode_result(make_result())
    content.config_records["result"]["seconds/" + "x" * 10**6] = 1.0
    assert decode_result(content).seconds == {"train": 1.5}
    content["more"] = ConfigRecord()
    with pytest.raises(BadMessageError, match="3 records, not 2"):
        decode_result(content)
