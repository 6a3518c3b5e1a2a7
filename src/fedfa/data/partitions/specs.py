"""Specifications of partitions, as TOML tables and in a short text form for the command line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedfa.error_messages import nearest
from fedfa.errors import DataError


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Iid(_Spec):
    """A uniform random share for every client, sizes equal to within one sample."""

    kind: Literal["iid"] = "iid"


class Shards(_Spec):
    """The paper's "#C = k": sort by label, cut into k·N equal shards, assign k shards to every client.

    Shards are cut from the samples in their stored order within each class. A client may draw two shards of one
    class, and a shard may span two classes where the class sizes do not fit.
    """

    kind: Literal["shards"] = "shards"
    classes_per_client: int = Field(2, ge=1)


class Classes(_Spec):
    """Exactly k distinct classes for every client, every class held by equally many clients (to within one).

    With ``samples_per_class`` every client holds that many of each of its classes and the rest stays unused; without
    it all samples of a class are shared equally among its holders.
    """

    kind: Literal["classes"] = "classes"
    classes_per_client: int = Field(2, ge=1)
    samples_per_class: int | None = Field(None, ge=1)


class Dirichlet(_Spec):
    """The samples of every class are spread over the clients in proportions drawn from Dir(α).

    Attributes:
        alpha: Concentration; small values give a strong skew.
        min_size: The fewest samples of a client. 0 is the pure draw, in which clients may be empty.
        short: What to do about clients below ``min_size``: ``top-up`` moves random samples from the largest clients to
            them (always succeeds); ``redraw`` draws everything again, at most ``redraws`` times.
        redraws: Maximum number of draws before ``redraw`` fails with an error.
    """

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(gt=0, allow_inf_nan=False)
    min_size: int = Field(1, ge=0)
    short: Literal["top-up", "redraw"] = "top-up"
    redraws: int = Field(100, ge=1)


class Quantity(_Spec):
    """The same label distribution everywhere, sizes in proportions drawn from Dir(α).

    Attributes:
        alpha: Concentration; with small values a few clients hold nearly everything.
        min_size: The fewest samples of a client; smaller ones receive samples from the largest.
    """

    kind: Literal["quantity"] = "quantity"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    min_size: int = Field(1, ge=0)


class Natural(_Spec):
    """One client per writer, or per random group of writers; the groups have equally many.

    Attributes:
        groups: Number of groups; None: the number of clients.
    """

    kind: Literal["natural"] = "natural"
    groups: int | None = Field(None, ge=1)


LabelPartition = Iid | Shards | Classes | Dirichlet | Quantity


class Domains(_Spec):
    """Equally many clients for every domain, each with samples of that domain only.

    Clients are numbered domain by domain: with 20 clients per domain, clients 0…19 hold the first domain.

    Attributes:
        inner: Partition of a domain's samples over its clients; a label partition gives the paper's combined skew.
    """

    kind: Literal["domains"] = "domains"
    inner: Annotated[LabelPartition, Field(discriminator="kind")] = Field(default_factory=Iid)


AnyPartition = Iid | Shards | Classes | Dirichlet | Quantity | Natural | Domains
PartitionSpec = Annotated[AnyPartition, Field(discriminator="kind")]

_ADAPTER: TypeAdapter[AnyPartition] = TypeAdapter(PartitionSpec)

#: The fields that the text form gives by position, in order.
_BY_POSITION: dict[str, tuple[str, ...]] = {
    "iid": (),
    "shards": ("classes_per_client",),
    "classes": ("classes_per_client", "samples_per_class"),
    "dirichlet": ("alpha", "min_size"),
    "quantity": ("alpha", "min_size"),
    "natural": ("groups",),
    "domains": (),
}


def parse_partition(text: str) -> AnyPartition:
    """Parse the text form: a kind, its fields by position, and for ``domains`` an inner partition after a slash.

    Example:
        >>> parse_partition("shards:2")
        Shards(kind='shards', classes_per_client=2)
        >>> parse_partition("domains/dirichlet:0.1").inner.alpha
        0.1
    """
    outer, slash, inner = text.strip().partition("/")
    kind, *values = outer.split(":")
    if kind not in _BY_POSITION:
        raise DataError(
            f"partition {text!r}: unknown kind {kind!r}{nearest(kind, _BY_POSITION)}; choose one of "
            f"{', '.join(_BY_POSITION)}"
        )
    names = _BY_POSITION[kind]
    if len(values) > len(names):
        takes = ":".join([kind, *(name.upper() for name in names)])
        raise DataError(f"partition {text!r}: too many values; the form is {takes}")
    fields: dict[str, object] = {"kind": kind, **dict(zip(names, values, strict=False))}
    if slash:
        if kind != "domains":
            raise DataError(f"partition {text!r}: only domains takes an inner partition, e.g. domains/shards:2")
        fields["inner"] = parse_partition(inner).model_dump()
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or kind
        raise DataError(f"partition {text!r}: {where}: {first['msg']}") from error


def partition_text(spec: AnyPartition) -> str:
    """The text form of a partition, the inverse of :func:`parse_partition` for fields that the form has.

    Example:
        >>> partition_text(parse_partition("domains/classes:2:500"))
        'domains/classes:2:500'
    """
    values = [getattr(spec, name) for name in _BY_POSITION[spec.kind]]
    defaults = [type(spec).model_fields[name].default for name in _BY_POSITION[spec.kind]]
    while len(values) > 1 and values[-1] == defaults[-1]:  # the first value is always shown
        values.pop(), defaults.pop()
    text = ":".join([spec.kind, *(f"{value:g}" for value in values if value is not None)])
    if isinstance(spec, Domains) and not isinstance(spec.inner, Iid):
        text += "/" + partition_text(spec.inner)
    return text
