"""Encoding of plans, results and evaluations as Flower's records.

=============  ==================================================================================================
to a site      ``model`` and one record ``broadcast/COMPONENT`` per component (arrays), ``plan`` (plain values)
from a site    ``contribution`` (arrays, named as by :func:`~fedfa.learning.aggregate.flatten_contribution`),
               ``result`` (plain values)
=============  ==================================================================================================

Tensors travel packed (:func:`pack`): each record holds one array, so a message costs by its bytes and not by its number
of tensors. Dtype and shape are preserved exactly, BatchNorm's counters stay integers, nothing is unpickled,
and a manifest that claims more than the bytes that follow is rejected before any memory is allocated.

Decoding raises :class:`BadMessageError` for any malformed input, because messages are not trusted.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedfa.channel.channel import Coded, Wire
from fedfa.flower.environment import disable_telemetry

disable_telemetry()
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedfa.learning.aggregate import flatten_contribution, unflatten_contribution
from fedfa.learning.client import ClientResult, RoundPlan
from fedfa.learning.context import LocalTraining
from fedfa.learning.evaluate import Evaluation
from fedfa.learning.tensors import ComponentTensors, Tensors

PACKED = "fedfa.packed"
"""Name and format of the one array in a record: length of the manifest, manifest (JSON: name, dtype and shape of each
tensor), elements in memory order, little-endian."""

_BROADCAST = "broadcast/"
_LONGEST_SECONDS = 1e9
"""Thirty years."""
_LARGEST_LOSS = float(torch.finfo(torch.float32).max)
_DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
                 "complex64", "complex128")
}  # fmt: skip


MOST_SAMPLES = 2**40
"""Largest plausible number of samples of a site."""
_MOST_DOMAINS = 1000
_LONGEST_TEXT = 300
STAGES = ("prepare", "train", "keep", "start")
"""Stages of which a site reports the seconds."""


def printable(text: str) -> str:
    r"""Text of a site for the log and the record: of bounded length, on one line, without control characters.

    Example:
        >>> printable("fine" + chr(10) + chr(27) + "[31m forged")
        'fine\\n\\x1b[31m forged'
    """
    cut = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}… ({len(text)} characters)"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in cut)


class BadMessageError(Exception):
    """A message is malformed or implausible; what it quotes of the message is printable and short."""

    def __init__(self, problem: str) -> None:
        super().__init__(printable(problem))


# -- tensors ----------------------------------------------------------------------------------------------------------
def pack(tensors: Wire) -> ArrayRecord:
    """Encode named tensors as a record of one array: Flower's cost grows with the number of arrays.

    Tensors that a channel has coded travel as they are, with their codec and their number of bytes in the manifest.

    Example:
        >>> record = pack({"a": torch.tensor(3), "b": torch.zeros(2)})
        >>> len(record), unpack(record)
        (1, {'a': tensor(3), 'b': tensor([0., 0.])})
    """
    manifest: list[list[object]] = []
    parts: list[bytes] = []
    for name, value in tensors.items():
        if isinstance(value, Coded):
            manifest.append([name, "float32", list(value.shape), value.codec, value.data.nbytes])
            parts.append(value.data.tobytes())
        else:
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            manifest.append([name, str(plain.dtype).removeprefix("torch."), list(plain.shape)])
            parts.append(_bytes_of(plain).tobytes())
    head = json.dumps(manifest).encode()
    data = b"".join([struct.pack("<Q", len(head)), head, *parts])
    return ArrayRecord({PACKED: Array("uint8", (len(data),), PACKED, data)})


def payload_nbytes(record: Mapping[str, Array]) -> int:
    """Bytes of the tensors in a record of :func:`pack`, without the manifest."""
    data = record[PACKED].data
    return len(data) - 8 - int(struct.unpack_from("<Q", data)[0])


def unpack(record: Mapping[str, Array], most: int | None = None) -> Tensors:
    """The inverse of :func:`pack`; each tensor has its own memory: kernels may take other paths on unaligned memory.

    Args:
        record: Of one array.
        most: Bytes that the tensors may have at most, where coded ones could be much larger than what arrived.

    Raises:
        BadMessageError: The manifest does not describe exactly the bytes that follow it.
    """
    if list(record) != [PACKED] or record[PACKED].stype != PACKED:
        raise BadMessageError("not packed tensors")
    data = record[PACKED].data
    try:
        (length,) = struct.unpack_from("<Q", data)
        listed = json.loads(data[8 : 8 + length])
        entries = [(name, _DTYPES[dtype], shape) for name, dtype, shape, *_ in listed]
        coded = {name: (one, size) for name, _, _, one, size in (entry for entry in listed if len(entry) != 3)}
        shapes = [size for _, _, shape in entries for size in shape] + [size for _, size in coded.values()]
        if not all(type(size) is int and 0 <= size < 2**40 for size in shapes):
            raise ValueError("a shape is not a list of sizes")
        if not all(type(name) is str for name, _, _ in entries) or len({name for name, _, _ in entries}) < len(entries):
            raise ValueError("a name is not text, or occurs twice")
        whole = [math.prod(shape) * dtype.itemsize for _, dtype, shape in entries]  # Python's integers do not overflow
        if coded and most is not None and sum(whole) > most:
            raise ValueError(f"{sum(whole)} bytes when decoded, more than {most}")
        sizes = [coded[name][1] if name in coded else size for (name, _, _), size in zip(entries, whole, strict=True)]
        if sum(sizes) != len(data) - 8 - length:
            raise ValueError(f"{len(data) - 8 - length} bytes follow, not {sum(sizes)}")
        tensors: Tensors = {}
        start = 8 + length
        for (name, dtype, shape), size in zip(entries, sizes, strict=True):
            here = np.frombuffer(data, np.uint8, size, start)
            if name in coded:
                tensors[name] = Coded(coded[name][0], tuple(shape), here.copy()).decoded()
            else:
                tensors[name] = torch.empty(shape, dtype=dtype)
                _bytes_of(tensors[name])[:] = here
            start += size
    # The bytes are anybody's: JSON, its nesting, NumPy and torch each fail in their own ways.
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise BadMessageError(f"the manifest of the tensors is not valid ({type(error).__name__}: {error})") from None
    return tensors


def _bytes_of(value: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8).numpy()


# -- to a site --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Instruction:
    """What a site needs besides the tensors of a plan."""

    run: str
    """The run's key on the sites' disks; it stays the same when the server is restarted."""
    client: int
    """Number of the client that the site acts as."""
    config: str
    """The run's complete config, as TOML."""
    origin: Mapping[str, str]
    """Fingerprints of the server's network, data and algorithm files."""
    versions: tuple[int, ...] = ()
    """Versions of the client state that the server may still need; the last one is current."""
    renew_lost_state: bool = True
    """Whether a site that lost its state may start with empty state."""


def encode_tensors(model: Wire, broadcast: Mapping[str, Wire]) -> dict[str, ArrayRecord]:
    """Records of the model and of the components' broadcast; made once per round, for all sites."""
    return {
        "model": pack(model),
        **{f"{_BROADCAST}{component}": pack(tensors) for component, tensors in broadcast.items()},
    }


def encode_instruction(instruction: Instruction, plan: RoundPlan | None = None) -> ConfigRecord:
    """Encode the plain values of a message to a site."""
    values: dict[str, Any] = {
        "run": instruction.run,
        "client": instruction.client,
        "config": instruction.config,
        "versions": list(instruction.versions),
        "renew_lost_state": instruction.renew_lost_state,
        **{f"origin/{what}": fingerprint for what, fingerprint in instruction.origin.items()},
    }
    if plan is not None:
        values |= {"round": plan.round, "rounds": plan.rounds, "seed": plan.seed, "final_pass": plan.final_pass}
        values |= {f"local/{name}": value for name, value in plan.local.model_dump().items() if value is not None}
    return ConfigRecord(values)


def decode_instruction(content: RecordDict) -> Instruction:
    """The inverse of :func:`encode_instruction`."""
    values = _plain(content, "plan")
    return Instruction(
        **_values(values, run=str, client=int, config=str, renew_lost_state=bool),
        origin={what: str(fingerprint) for what, fingerprint in _below(values, "origin/").items()},
        versions=tuple(int(version) for version in _value(values, "versions", list)),
    )


def decode_plan(content: RecordDict) -> RoundPlan:
    """Decode the plan of a round."""
    values = _plain(content, "plan")
    model, broadcast = decode_model(content)
    try:
        local = LocalTraining(**_below(values, "local/"))
    except TypeError as error:
        raise BadMessageError(f"the plan has no valid local training: {error}") from None
    plain = _values(values, round=int, seed=int, rounds=int, final_pass=bool)
    return RoundPlan(model=model, broadcast=broadcast, local=local, **plain)


def decode_model(content: RecordDict) -> tuple[Tensors, ComponentTensors]:
    """Decode the weights and the components' broadcast."""
    if "model" not in content.array_records:
        raise BadMessageError("the message has no model")
    broadcast = _below(content.array_records, _BROADCAST)
    return unpack(content.array_records["model"]), {
        component: unpack(record) for component, record in broadcast.items()
    }


# -- from a site ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SiteResult:
    """A client's result and what the site reports with it."""

    result: ClientResult
    """Without the client state, which stays at the site."""
    run: str
    round: int
    keeps: bool
    """Whether the site keeps client state for the next round."""
    lost: bool = False
    """Whether it started with empty state because its state was missing."""
    seconds: Mapping[str, float] | None = None
    """Time by stage."""


def encode_result(site: SiteResult, wire: Wire | None = None) -> RecordDict:
    """Encode the reply to a plan; ``wire`` is the contribution as a channel has coded it."""
    result = site.result
    values: dict[str, Any] = {
        **{name: getattr(site, name) for name in ("run", "round", "keeps", "lost")},
        **{name: getattr(result, name) for name in ("client", "steps", "sample_steps")},
        "cpu_seconds": float(result.cpu_seconds),
        **({} if result.loss is None else {"loss": float(result.loss)}),
        **{f"seconds/{stage}": float(spent) for stage, spent in (site.seconds or {}).items()},
    }
    contribution = pack(flatten_contribution(result.contribution) if wire is None else wire)
    return RecordDict({"contribution": contribution, "result": ConfigRecord(values)})


def decode_result(content: RecordDict, most: int | None = None) -> SiteResult:
    """The inverse of :func:`encode_result`; :mod:`fedfa.flower.checks` decides whether the result is plausible.

    Args:
        content: The reply.
        most: Bytes that the contribution may have when decoded.
    """
    values = _plain(content, "result")
    if "contribution" not in content.array_records:
        raise BadMessageError("the reply has no contribution")
    if len(content) > 2:
        raise BadMessageError(f"the reply has {len(content)} records, not 2")
    flat = unpack(content.array_records["contribution"], most)
    groups = {name.removesuffix("#weight") for name in flat if ":" not in name and name.endswith("#weight")}
    for name in flat:
        if ":" in name and name.split(":", 1)[0] not in groups:
            raise BadMessageError(f"the sum {name!r} has no weight")
        if ":" not in name and not name.endswith("#weight"):
            raise BadMessageError(f"{name!r} is neither a sum nor a weight")
    result = ClientResult(
        **_values(values, client=int, steps=int, sample_steps=int),
        contribution=unflatten_contribution(flat),
        client_state={},
        loss=_loss(values),
        cpu_seconds=_duration(values, "cpu_seconds"),
    )
    seconds = {stage: _duration(values, key) for stage in STAGES if (key := f"seconds/{stage}") in values}
    return SiteResult(result=result, seconds=seconds, **_values(values, run=str, round=int, keeps=bool, lost=bool))


@dataclass(frozen=True)
class Announcement:
    """What a site announces before it takes part."""

    site: int
    """Its client number (``partition-id``)."""
    sites: int | None
    """Number of sites (``num-partitions``), if configured."""
    version: str
    """Version of fedfa."""
    samples: int | None = None
    """Number of training samples; left out if the server knows the partition."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one network input."""
    integer_inputs: bool = False
    """Whether the inputs are integers, such as tokens."""


def encode_announcement(site: Announcement) -> RecordDict:
    """Encode the reply to ``query.site``."""
    values = {name: value for name, value in asdict(site).items() if value is not None}
    if site.input_shape is not None:
        values["input_shape"] = list(site.input_shape)
    return RecordDict({"site": ConfigRecord(values)})


def decode_announcement(content: RecordDict) -> Announcement:
    """The inverse of :func:`encode_announcement`."""
    values = _plain(content, "site")
    shape = values.get("input_shape")
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int and 0 < n < 2**31 for n in shape)):
        raise BadMessageError(f"input_shape = {shape!r} is not a shape")
    return Announcement(
        **_values(values, site=int, version=str),
        sites=_value(values, "sites", int) if "sites" in values else None,
        samples=_value(values, "samples", int) if "samples" in values else None,
        input_shape=None if shape is None else tuple(shape),
        integer_inputs=_value(values, "integer_inputs", bool) if "integer_inputs" in values else False,
    )


@dataclass(frozen=True)
class SiteEvaluation:
    """A site's evaluation, with the sample counts needed to combine evaluations."""

    client: int
    evaluation: Evaluation
    class_counts: tuple[int, ...]
    """Test samples by class."""
    domain_counts: tuple[int, ...] = ()
    """Test samples by domain, in the order of the evaluation's domains."""


def encode_evaluation(site: SiteEvaluation) -> RecordDict:
    """Encode the reply to ``evaluate``."""
    evaluation = site.evaluation
    values: dict[str, Any] = {
        "client": site.client,
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "class_counts": list(site.class_counts),
        "class_accuracy": [math.nan if value is None else value for value in evaluation.class_accuracy],
        "domains": list(evaluation.domain_accuracy),
        "domain_accuracy": list(evaluation.domain_accuracy.values()),
        "domain_counts": list(site.domain_counts),
    }
    return RecordDict({"evaluation": ConfigRecord(values)})


def decode_evaluation(content: RecordDict, num_classes: int) -> SiteEvaluation:
    """The inverse of :func:`encode_evaluation`, with every number checked."""
    values = _plain(content, "evaluation")
    counts, by_class = _value(values, "class_counts", list), _value(values, "class_accuracy", list)
    domains, by_domain = _value(values, "domains", list), _value(values, "domain_accuracy", list)
    if len(content) > 1 or len(domains) > _MOST_DOMAINS or any(len(str(name)) > _LONGEST_TEXT for name in domains):
        raise BadMessageError("the evaluation has more records or domains than there can be")
    if len(counts) != num_classes or len(by_class) != num_classes or len(domains) != len(by_domain):
        raise BadMessageError(f"the evaluation does not have {num_classes} classes")
    by_domain_counts = _value(values, "domain_counts", list)
    if len(by_domain_counts) != len(domains):
        raise BadMessageError(f"the evaluation has {len(domains)} domains, but counts of {len(by_domain_counts)}")
    numbers = all(type(count) is int and 0 <= count <= MOST_SAMPLES for count in [*counts, *by_domain_counts])
    if not numbers or not any(counts) or not all(by_domain_counts):
        raise BadMessageError("the evaluation's counts are not numbers of samples")
    accuracy = _value(values, "accuracy", float)
    fractions = [accuracy, *by_domain, *(value for value, count in zip(by_class, counts, strict=True) if count)]
    if any(type(value) is not float or not 0 <= value <= 1 for value in fractions):
        raise BadMessageError("an accuracy is not between 0 and 1")
    evaluation = Evaluation(
        accuracy=accuracy,
        loss=_value(values, "loss", float),
        class_accuracy=[value if count else None for value, count in zip(by_class, counts, strict=True)],
        domain_accuracy=dict(zip(map(str, domains), by_domain, strict=True)),
    )
    return SiteEvaluation(_value(values, "client", int), evaluation, tuple(counts), tuple(by_domain_counts))


# -- plain values -----------------------------------------------------------------------------------------------------
ValueT = TypeVar("ValueT")


def _plain(content: RecordDict, name: str) -> Mapping[str, Any]:
    if name not in content.config_records:
        raise BadMessageError(f"the message has no record {name!r}")
    return content.config_records[name]


def _below(values: Mapping[str, ValueT], prefix: str) -> dict[str, ValueT]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _value(values: Mapping[str, Any], name: str, kind: type[ValueT]) -> ValueT:
    """Value of exactly this type: a bool is not an int."""
    value = values.get(name)
    if type(value) is not kind:
        raise BadMessageError(f"{name} = {value!r} is not of type {kind.__name__}")
    return value


def _values(values: Mapping[str, Any], **kinds: type[Any]) -> dict[str, Any]:
    return {name: _value(values, name, kind) for name, kind in kinds.items()}


def _duration(values: Mapping[str, Any], name: str) -> float:
    """Seconds; durations are summed, so NaN and infinity are not allowed."""
    seconds = _value(values, name, float)
    if not 0 <= seconds <= _LONGEST_SECONDS:
        raise BadMessageError(f"{name} = {seconds} is not a duration")
    return seconds


def _loss(values: Mapping[str, Any]) -> float | None:
    """Training loss; one that is not finite is allowed and left out later, but finite ones must be summable."""
    loss = _value(values, "loss", float) if "loss" in values else None
    if loss is not None and math.isfinite(loss) and abs(loss) > _LARGEST_LOSS:
        raise BadMessageError(f"loss = {loss} is not a loss")
    return loss
