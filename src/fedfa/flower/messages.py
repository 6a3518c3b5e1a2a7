"""What travels: plans and results of rounds as Flower's records, and back.

=============  ==================================================================================================
to a site      ``model`` and one record ``received/PART`` per part (arrays), ``plan`` (plain values)
from a site    ``sums`` (arrays, named as :func:`~fedfa.learning.sums.flatten_sums` does), ``result`` (plain values)
=============  ==================================================================================================

Arrays are NumPy's own format, written and read here: dtype and shape are kept to the bit, BatchNorm's counters stay
whole numbers, nothing is unpickled, and an array that claims to be larger than the bytes that came is refused before
any memory is taken. What NumPy has no type for (bfloat16) goes as plain bytes.

Reading raises :class:`BadMessageError`: whoever reads a stranger's message must expect anything.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedfa.flower.environment import hush

hush()
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: E402  (Flower reads the environment on import)

from fedfa.learning.client import ClientResult, RoundPlan  # noqa: E402
from fedfa.learning.evaluate import Evaluation  # noqa: E402
from fedfa.learning.part import LocalTraining  # noqa: E402
from fedfa.learning.sums import flatten_sums, unflatten_sums  # noqa: E402
from fedfa.learning.tensors import PartTensors, Tensors  # noqa: E402

NUMPY = "numpy.ndarray"
"""Flower's name for NumPy's format."""
BYTES = "fedfa.bytes"
"""Elements in memory order, little-endian; for types that NumPy lacks."""

_RECEIVED = "received/"
_LONGEST = 1e9
"""Seconds; thirty years."""
_LARGEST = float(torch.finfo(torch.float32).max)
_AS_BYTES = {torch.bfloat16: torch.int16}
"""Types that travel as plain bytes, and the whole numbers of the same width that stand for them."""
_DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64",
                 "complex128")
}  # fmt: skip


class BadMessageError(Exception):
    """A message is not what it should be; says how."""


# -- arrays -----------------------------------------------------------------------------------------------------------
def array_of(value: Tensor) -> Array:
    """A tensor as Flower's array.

    Example:
        >>> array = array_of(torch.tensor(3))
        >>> array.dtype, array.shape, tensor_of(array)
        ('int64', (), tensor(3))
    """
    value = value.detach().cpu().resolve_conj().resolve_neg()
    if value.dtype in _AS_BYTES:
        plain = value.contiguous().view(_AS_BYTES[value.dtype]).numpy()
        return Array(_name(value.dtype), tuple(value.shape), BYTES, plain.tobytes())
    written = io.BytesIO()
    np.lib.format.write_array(written, value.numpy(), allow_pickle=False)
    return Array(_name(value.dtype), tuple(value.shape), NUMPY, written.getvalue())


def tensor_of(array: Array) -> Tensor:
    """The tensor that an array holds, in memory of its own.

    Raises:
        BadMessageError: Unknown type or form, or more or fewer bytes than the shape needs.
    """
    try:
        if array.stype == BYTES:
            return _from_bytes(array)
        if array.stype != NUMPY:
            raise BadMessageError(f"unknown form {array.stype!r}")
        file = io.BytesIO(array.data)
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise BadMessageError(f"unknown version {version} of NumPy's format")
        shape, by_columns, dtype = read_header(file)
        known = _DTYPES.get(dtype.name)
        if known is None:
            raise BadMessageError(f"unknown type of numbers {dtype}")
        return _filled(array.data, file.tell(), dtype, known, shape, by_columns)
    except BadMessageError:
        raise
    # NumPy parses the head as Python's own tokens, which fails in many ways; and a shape without elements can still be
    # more than torch can count, or have more dimensions than NumPy allows.
    except Exception as error:
        raise BadMessageError(f"not an array in NumPy's format ({type(error).__name__}: {error})") from None


def _from_bytes(array: Array) -> Tensor:
    for dtype, standing_for in _AS_BYTES.items():
        if array.dtype == _name(dtype):
            numbers = np.dtype(_name(standing_for)).newbyteorder("<")
            return _filled(array.data, 0, numbers, standing_for, tuple(array.shape), False).view(dtype)
    raise BadMessageError(f"unknown type of numbers {array.dtype!r}")


def _filled(
    data: bytes, start: int, dtype: np.dtype[Any], known: torch.dtype, shape: tuple[int, ...], by_columns: bool
) -> Tensor:
    """Copy the elements to where torch puts its own: kernels may take other paths on memory that is not aligned."""
    count = math.prod(shape)  # exact: Python's numbers do not overflow
    if any(length < 0 for length in shape) or len(data) - start != count * dtype.itemsize:
        raise BadMessageError(
            f"{max(len(data) - start, 0)} bytes do not make {dtype} of shape {list(shape)}, which needs "
            f"{count * dtype.itemsize}"
        )
    tensor = torch.empty(shape[::-1] if by_columns else shape, dtype=known)
    if count:
        tensor.numpy()[...] = np.frombuffer(data, dtype, count, start).reshape(tensor.shape)
    return tensor.permute(*reversed(range(len(shape)))) if by_columns else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as a record."""
    return ArrayRecord({name: array_of(value) for name, value in tensors.items()})


def tensors_of(record: Mapping[str, Array]) -> Tensors:
    """The inverse of :func:`arrays_of`.

    Raises:
        BadMessageError: Names the array that cannot be read.
    """
    tensors: Tensors = {}
    for name, array in record.items():
        try:
            tensors[name] = tensor_of(array)
        except BadMessageError as error:
            raise BadMessageError(f"{name}: {error}") from None
    return tensors


# -- to a site --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Instruction:
    """What a site needs besides the tensors of a plan."""

    run: str
    """Names the run on the sites' disks; the same after the server was restarted."""
    client: int
    """Number of the client that the site is to be."""
    settings: str
    """The run's complete settings, as TOML."""
    origin: Mapping[str, str]
    """Fingerprints of what the server works with: network, data, method files."""
    versions: tuple[int, ...] = ()
    """Versions of the site's state that the server may still ask for; the last one is to be used."""
    renew_lost_state: bool = True
    """Whether a site that lost its state may begin anew."""


def model_record(model: Tensors) -> ArrayRecord:
    """The weights; made once a round, for all sites."""
    return arrays_of(model)


def received_records(received: PartTensors) -> dict[str, ArrayRecord]:
    """What the parts send; made once a round, for all sites."""
    return {f"{_RECEIVED}{part}": arrays_of(tensors) for part, tensors in received.items()}


def instruct(instruction: Instruction, plan: RoundPlan | None = None) -> ConfigRecord:
    """The plain values of a message to a site."""
    values: dict[str, Any] = {
        "run": instruction.run,
        "client": instruction.client,
        "settings": instruction.settings,
        "versions": list(instruction.versions),
        "renew_lost_state": instruction.renew_lost_state,
        **{f"origin/{what}": mark for what, mark in instruction.origin.items()},
    }
    if plan is not None:
        values |= {"round": plan.round, "rounds": plan.rounds, "seed": plan.seed, "survey": plan.survey}
        values |= {f"local/{name}": value for name, value in asdict(plan.local).items() if value is not None}
    return ConfigRecord(values)


def read_instruction(content: RecordDict) -> Instruction:
    """The inverse of :func:`instruct`."""
    values = _plain(content, "plan")
    return Instruction(
        run=_value(values, "run", str),
        client=_value(values, "client", int),
        settings=_value(values, "settings", str),
        origin={key.removeprefix("origin/"): str(mark) for key, mark in values.items() if key.startswith("origin/")},
        versions=tuple(int(version) for version in _value(values, "versions", list)),
        renew_lost_state=_value(values, "renew_lost_state", bool),
    )


def read_plan(content: RecordDict) -> RoundPlan:
    """The plan of a round, as a site receives it."""
    values = _plain(content, "plan")
    model, received = read_model(content)
    local = {key.removeprefix("local/"): value for key, value in values.items() if key.startswith("local/")}
    try:
        training = LocalTraining(**local)
    except TypeError as error:
        raise BadMessageError(f"the plan does not say how to train: {error}") from None
    return RoundPlan(
        round=_value(values, "round", int),
        model=model,
        received=received,
        local=training,
        seed=_value(values, "seed", int),
        rounds=_value(values, "rounds", int),
        survey=_value(values, "survey", bool),
    )


def read_model(content: RecordDict) -> tuple[Tensors, PartTensors]:
    """The weights, and what the parts sent."""
    if "model" not in content.array_records:
        raise BadMessageError("the message has no model")
    received = {
        name.removeprefix(_RECEIVED): tensors_of(record)
        for name, record in content.array_records.items()
        if name.startswith(_RECEIVED)
    }
    return tensors_of(content.array_records["model"]), received


# -- from a site ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SiteResult:
    """What a site says about a round besides its sums."""

    result: ClientResult
    """Without what the client keeps: that stays with it."""
    run: str
    round: int
    keeps: bool
    """Whether the site keeps tensors of this client for its next round."""
    lost: bool = False
    """Whether it began anew because its state was gone."""
    seconds: Mapping[str, float] | None = None
    """Where the time went, by stage."""


def describe_result(site: SiteResult) -> RecordDict:
    """The reply to a plan."""
    result = site.result
    values: dict[str, Any] = {
        "run": site.run,
        "round": site.round,
        "client": result.client,
        "keeps": site.keeps,
        "lost": site.lost,
        "steps": result.steps,
        "sample_steps": result.sample_steps,
        "cpu_seconds": float(result.cpu_seconds),
        **({} if result.loss is None else {"loss": float(result.loss)}),
        **{f"seconds/{stage}": float(spent) for stage, spent in (site.seconds or {}).items()},
    }
    return RecordDict({"sums": arrays_of(flatten_sums(result.sums)), "result": ConfigRecord(values)})


def read_result(content: RecordDict) -> SiteResult:
    """The inverse of :func:`describe_result`; whether it makes sense is for :mod:`fedfa.flower.checks`."""
    values = _plain(content, "result")
    if "sums" not in content.array_records:
        raise BadMessageError("the reply has no sums")
    flat = tensors_of(content.array_records["sums"])
    groups = {name.removesuffix("#weight") for name in flat if ":" not in name and name.endswith("#weight")}
    for name in flat:
        if ":" in name and name.split(":", 1)[0] not in groups:
            raise BadMessageError(f"the sum {name!r} has no weight")
        if ":" not in name and not name.endswith("#weight"):
            raise BadMessageError(f"{name!r} is neither a sum nor a weight")
    result = ClientResult(
        client=_value(values, "client", int),
        sums=unflatten_sums(flat),
        kept={},
        steps=_value(values, "steps", int),
        sample_steps=_value(values, "sample_steps", int),
        loss=_loss(values),
        cpu_seconds=_duration(values, "cpu_seconds"),
    )
    return SiteResult(
        result=result,
        run=_value(values, "run", str),
        round=_value(values, "round", int),
        keeps=_value(values, "keeps", bool),
        lost=_value(values, "lost", bool),
        seconds={key.removeprefix("seconds/"): _duration(values, key) for key in values if key.startswith("seconds/")},
    )


@dataclass(frozen=True)
class Announcement:
    """What a site says of itself before it takes part."""

    site: int
    """Its number among the clients (``partition-id``)."""
    sites: int | None
    """How many there are (``num-partitions``), where it knows."""
    version: str
    """Of fedfa."""
    samples: int | None = None
    """How many training samples it holds; left out where the server knows the split itself."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one input as the network reads it."""


def describe_site(site: Announcement) -> RecordDict:
    """The reply to the question who a node is."""
    values = {name: value for name, value in asdict(site).items() if value is not None}
    if site.input_shape is not None:
        values["input_shape"] = list(site.input_shape)
    return RecordDict({"site": ConfigRecord(values)})


def read_announcement(content: RecordDict) -> Announcement:
    """The inverse of :func:`describe_site`."""
    values = _plain(content, "site")
    shape = values.get("input_shape")
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int and 0 < n < 2**31 for n in shape)):
        raise BadMessageError(f"input_shape = {shape!r} is not a shape")
    return Announcement(
        site=_value(values, "site", int),
        sites=_value(values, "sites", int) if "sites" in values else None,
        version=_value(values, "version", str),
        samples=_value(values, "samples", int) if "samples" in values else None,
        input_shape=None if shape is None else tuple(shape),
    )


@dataclass(frozen=True)
class SiteEvaluation:
    """A site's evaluation, with the counts that make it a share of a larger one."""

    client: int
    evaluation: Evaluation
    class_counts: tuple[int, ...]
    """Test samples by class."""
    domain_counts: tuple[int, ...] = ()
    """Test samples by domain, in the order of the evaluation's."""


def describe_evaluation(site: SiteEvaluation) -> RecordDict:
    """The reply to a model that was sent to be tested."""
    one = site.evaluation
    values: dict[str, Any] = {
        "client": site.client,
        "accuracy": one.accuracy,
        "loss": one.loss,
        "class_counts": list(site.class_counts),
        "class_accuracy": [math.nan if value is None else value for value in one.class_accuracy],
        "domains": list(one.domain_accuracy),
        "domain_accuracy": list(one.domain_accuracy.values()),
        "domain_counts": list(site.domain_counts),
    }
    return RecordDict({"evaluation": ConfigRecord(values)})


def read_evaluation(content: RecordDict, num_classes: int) -> SiteEvaluation:
    """The inverse of :func:`describe_evaluation`, with every number checked."""
    values = _plain(content, "evaluation")
    counts, by_class = _value(values, "class_counts", list), _value(values, "class_accuracy", list)
    domains, by_domain = _value(values, "domains", list), _value(values, "domain_accuracy", list)
    if len(counts) != num_classes or len(by_class) != num_classes or len(domains) != len(by_domain):
        raise BadMessageError(f"the evaluation is not one of {num_classes} classes")
    by_domain_counts = _value(values, "domain_counts", list)
    if len(by_domain_counts) != len(domains):
        raise BadMessageError(f"the evaluation has {len(domains)} domains, but counts of {len(by_domain_counts)}")
    numbers = all(type(count) is int and count >= 0 for count in [*counts, *by_domain_counts])
    if not numbers or not any(counts) or not all(by_domain_counts):
        raise BadMessageError("the evaluation's counts are not numbers of samples")
    accuracy = _value(values, "accuracy", float)
    shares = [accuracy, *by_domain, *(share for share, count in zip(by_class, counts, strict=True) if count)]
    if any(type(share) is not float or not 0 <= share <= 1 for share in shares):
        raise BadMessageError("an accuracy is not between 0 and 1")
    evaluation = Evaluation(
        accuracy=accuracy,
        loss=_value(values, "loss", float),
        class_accuracy=[share if count else None for share, count in zip(by_class, counts, strict=True)],
        domain_accuracy=dict(zip(map(str, domains), by_domain, strict=True)),
    )
    return SiteEvaluation(_value(values, "client", int), evaluation, tuple(counts), tuple(by_domain_counts))


# -- plain values -----------------------------------------------------------------------------------------------------
ValueT = TypeVar("ValueT")


def _plain(content: RecordDict, name: str) -> Mapping[str, Any]:
    if name not in content.config_records:
        raise BadMessageError(f"the message has no record {name!r}")
    return content.config_records[name]


def _value(values: Mapping[str, Any], name: str, kind: type[ValueT]) -> ValueT:
    """A value of exactly this type: a truth value is no whole number."""
    value = values.get(name)
    if type(value) is not kind:
        raise BadMessageError(f"{name} = {value!r} is not of type {kind.__name__}")
    return value


def _duration(values: Mapping[str, Any], name: str) -> float:
    """Seconds: they are added up for the record, which has no place for NaN or infinity."""
    seconds = _value(values, name, float)
    if not 0 <= seconds <= _LONGEST:
        raise BadMessageError(f"{name} = {seconds} is no duration")
    return seconds


def _loss(values: Mapping[str, Any]) -> float | None:
    """A training loss; one that is not finite is allowed and left out later, but those that count must add up."""
    loss = _value(values, "loss", float) if "loss" in values else None
    if loss is not None and math.isfinite(loss) and abs(loss) > _LARGEST:
        raise BadMessageError(f"loss = {loss} is no loss")
    return loss
