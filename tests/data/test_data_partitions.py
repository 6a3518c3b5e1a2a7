"""Splits: disjoint, exhaustive, seeded, right class counts, always an end."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfa.data import (
    AnyPartition,
    Classes,
    Dirichlet,
    Domains,
    Iid,
    Natural,
    Partition,
    Quantity,
    Samples,
    Shards,
    parse_partition,
    partition,
    partition_text,
)
from fedfa.errors import DataError


def samples_of(labels: Any, domains: Any = None, writers: Any = None) -> Samples:
    as_tensor = {
        name: None if values is None else torch.as_tensor(np.asarray(values, dtype=np.int64))
        for name, values in (("domains", domains), ("writers", writers))
    }
    numbers = torch.as_tensor(np.asarray(labels, dtype=np.int64))
    return Samples(torch.zeros(len(numbers), 1), numbers, **as_tensor)


label_lists = st.integers(1, 12).flatmap(
    lambda classes: st.tuples(st.just(classes), st.lists(st.integers(0, classes - 1), min_size=1, max_size=300))
)
label_specs: st.SearchStrategy[AnyPartition] = st.one_of(
    st.just(Iid()),
    st.builds(Shards, classes_per_client=st.integers(1, 5)),
    st.builds(Classes, classes_per_client=st.integers(1, 5), samples_per_class=st.none() | st.integers(1, 6)),
    st.builds(
        Dirichlet,
        alpha=st.floats(1e-6, 1e6),
        min_size=st.integers(0, 4),
        short=st.sampled_from(["top-up", "redraw"]),
        redraws=st.just(3),
    ),
    st.builds(Quantity, alpha=st.floats(1e-6, 1e6), min_size=st.integers(0, 4)),
)


def check_disjoint(split: Partition, samples: int, clients: int) -> None:
    assert len(split) == clients
    assert len(np.unique(split.order)) == len(split.order)
    if len(split.order):
        assert split.order.min() >= 0
        assert split.order.max() < samples
    assert np.array_equal(np.concatenate([split.client(i) for i in range(clients)]), split.order)


@given(label_lists, st.integers(1, 40), label_specs, st.integers(0, 2**32))
def test_any_split_is_disjoint_exhaustive_and_seeded(
    drawn: tuple[int, list[int]], clients: int, spec: AnyPartition, seed: int
) -> None:
    num_classes, labels = drawn
    data = samples_of(labels)
    try:
        split = partition(data, spec, clients, num_classes, seed)
    except DataError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "use" in message or "only" in message  # gives advice
        return
    check_disjoint(split, len(labels), clients)
    again = partition(data, spec, clients, num_classes, seed)
    assert np.array_equal(split.order, again.order)
    assert np.array_equal(split.offsets, again.offsets)
    counts = split.label_counts(labels, num_classes)
    assert counts.sum(axis=1).tolist() == split.sizes.tolist()
    if not isinstance(spec, Classes):
        assert len(split.order) == len(labels)
    if isinstance(spec, Iid):
        assert split.sizes.max() - split.sizes.min() <= 1
    if isinstance(spec, Dirichlet | Quantity):
        assert split.sizes.min() >= spec.min_size
    if isinstance(spec, Shards):
        assert split.sizes.max() - split.sizes.min() <= spec.classes_per_client


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 60), st.none() | st.integers(1, 5), st.integers(0, 999))
def test_classes_gives_exactly_k_distinct_classes(
    num_classes: int, per_client: int, clients: int, each: int | None, seed: int
) -> None:
    per_client = min(per_client, num_classes)
    labels = np.repeat(np.arange(num_classes), clients * 5)
    spec = Classes(classes_per_client=per_client, samples_per_class=each)
    split = partition(samples_of(labels), spec, clients, num_classes, seed)
    counts = split.label_counts(labels, num_classes)
    assert ((counts > 0).sum(axis=1) == per_client).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    if each is not None:
        assert set(counts[counts > 0].tolist()) == {each}
    else:
        used = holders > 0
        assert len(split.order) == used.sum() * clients * 5  # nothing of a class that is held is left over


def test_classes_are_dealt_in_many_combinations() -> None:
    labels = np.repeat(np.arange(10), 2000)
    for per_client in (2, 3, 7):
        spec = Classes(classes_per_client=per_client)
        counts = partition(samples_of(labels), spec, 1000, 10, 1).label_counts(labels, 10) > 0
        pairs = counts.T.astype(int) @ counts.astype(int)
        assert (pairs > 0).all()  # every two classes meet on some client


@given(st.integers(1, 20), st.integers(1, 6), st.integers(2, 10), st.integers(0, 999))
def test_shards_of_balanced_classes_hold_at_most_k_classes(clients: int, per_client: int, size: int, seed: int) -> None:
    """When a class is a whole number of shards, no shard straddles two classes."""
    num_classes = per_client * clients
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(num_classes), size))
    split = partition(samples_of(labels), Shards(classes_per_client=per_client), clients, num_classes, seed)
    counts = split.label_counts(labels, num_classes)
    assert (split.sizes == per_client * size).all()
    assert ((counts > 0).sum(axis=1) == per_client).all()


def test_shards_are_those_of_the_paper() -> None:
    """Fashion-MNIST's shape: 60,000 samples, 100 clients, two shards of 300."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 6000))
    split = partition(samples_of(labels), Shards(classes_per_client=2), 100, 10, 7)
    counts = split.label_counts(labels, 10)
    assert set(np.unique(counts)) <= {0, 300, 600}
    assert (split.sizes == 600).all()


def test_seeds_differ() -> None:
    labels = np.repeat(np.arange(10), 30)
    for text in ("iid", "shards:2", "classes:2", "dirichlet:0.5", "quantity:0.5"):
        first, second = (partition(samples_of(labels), parse_partition(text), 10, 10, seed) for seed in (1, 2))
        assert not np.array_equal(first.order, second.order), text


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.1, 1.0, 1e12])
def test_dirichlet_never_gives_nan(alpha: float) -> None:
    labels = np.repeat(np.arange(10), 100)
    split = partition(samples_of(labels), Dirichlet(alpha=alpha, min_size=0), 50, 10, 1)
    assert len(split.order) == 1000


def test_dirichlet_means_and_spread() -> None:
    """Shares of a class are Dir(α): mean 1/N, variance (1/N)(1 − 1/N) / (Nα + 1); no client is favoured."""
    labels, clients, alpha = np.zeros(10_000, dtype=np.int64), 5, 0.5
    shares = np.stack(
        [
            partition(samples_of(labels), Dirichlet(alpha=alpha, min_size=0), clients, 1, seed).sizes / 10_000
            for seed in range(600)
        ]
    )
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.allclose(shares.mean(axis=0), 1 / clients, atol=0.04)
    assert np.allclose(shares.var(axis=0), expected, rtol=0.25)


def test_the_last_client_gets_no_leftovers() -> None:
    """With many clients and small α most clients hold nothing of a class, and the last is no exception."""
    labels = np.zeros(50, dtype=np.int64)
    spec = Dirichlet(alpha=0.01, min_size=0)
    held = np.stack([partition(samples_of(labels), spec, 50, 1, seed).sizes > 0 for seed in range(200)])
    assert held[:, -1].mean() < 0.15


def test_top_up_takes_from_the_largest() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    pure = partition(samples_of(labels), Dirichlet(alpha=0.05, min_size=0), 50, 1, 3)
    assert pure.sizes.min() == 0
    topped = partition(samples_of(labels), Dirichlet(alpha=0.05, min_size=5), 50, 1, 3)
    assert topped.sizes.min() == 5
    middle = (pure.sizes >= 5) & (pure.sizes < topped.sizes.max())
    assert (topped.sizes[middle] == pure.sizes[middle]).all()


def test_redraw_ends_with_advice() -> None:
    labels = np.zeros(100, dtype=np.int64)
    spec = Dirichlet(alpha=0.001, min_size=10, short="redraw", redraws=5)
    with pytest.raises(DataError, match=r"5 draws.*larger alpha"):
        partition(samples_of(labels), spec, 10, 1, 1)


def test_impossible_splits_say_why() -> None:
    data = samples_of(np.arange(20) % 2)
    for text, clients, message in (
        ("dirichlet:0.1", 30, "min_size = 0"),
        ("shards:2", 11, "at least 22 samples"),
        ("classes:3", 2, "only 2"),
        ("classes:1:50", 2, "need 50 each"),
        ("domains", 2, "one domain only"),
        ("natural", 2, "has no writers"),
        ("iid", 0, "at least one client"),
    ):
        with pytest.raises(DataError, match=message):
            partition(data, parse_partition(text), clients, 2, 1)
    with pytest.raises(DataError, match="labels run from 0 to 1"):
        partition(data, Iid(), 2, 1, 1)
    with pytest.raises(DataError, match="needs a number of clients"):
        partition(data, Iid(), None, 2, 1)


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from(["iid", "shards:2", "dirichlet:0.3", "classes:2"]))
def test_domains_keep_to_themselves(domains: int, per_domain: int, inner: str) -> None:
    count = domains * 120
    of = np.random.default_rng(1).permutation(np.arange(count) % domains)
    labels = np.arange(count) % 4
    spec = Domains(inner=parse_partition(inner))
    split = partition(samples_of(labels, domains=of), spec, domains * per_domain, 4, 5)
    check_disjoint(split, count, domains * per_domain)
    if inner != "classes:2" or per_domain > 1:  # one client of two classes leaves the other two unassigned
        assert len(split.order) == count
    for client in range(len(split)):
        assert set(of[split.client(client)].tolist()) <= {client // per_domain}


def test_domains_must_divide_the_clients() -> None:
    data = samples_of(np.zeros(30), domains=np.arange(30) % 3)
    with pytest.raises(DataError, match="use for example 9"):
        partition(data, Domains(), 10, 1, 1)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(1, 40), st.integers(0, 99))
def test_natural_never_splits_a_writer(writers: list[int], clients: int, seed: int) -> None:
    data = samples_of(np.zeros(len(writers)), writers=writers)
    number = len(set(writers))
    if clients > number:
        with pytest.raises(DataError, match=f"only {number} writers"):
            partition(data, Natural(), clients, 1, seed)
        return
    split = partition(data, Natural(), clients, 1, seed)
    check_disjoint(split, len(writers), clients)
    assert len(split.order) == len(writers)
    owner: dict[int, int] = {}
    for client in range(clients):
        for position in split.client(client):
            assert owner.setdefault(writers[position], client) == client
    per_client = np.bincount(list(owner.values()), minlength=clients)
    assert per_client.max() - per_client.min() <= 1


def test_natural_takes_its_number_from_the_data() -> None:
    data = samples_of(np.zeros(12), writers=np.arange(12) % 4)
    assert len(partition(data, Natural(), None, 1, 1)) == 4
    assert len(partition(data, Natural(groups=2), None, 1, 1)) == 2
    with pytest.raises(DataError, match="set only one of the two"):
        partition(data, Natural(groups=2), 3, 1, 1)


@pytest.mark.parametrize(
    "text",
    [
        "iid", "shards:2", "classes:2", "classes:2:500", "dirichlet:0.1", "dirichlet:0.5:10", "quantity:0.5",
        "domains", "domains/shards:2", "domains/dirichlet:0.1", "natural", "natural:100",
    ],
)  # fmt: skip
def test_short_texts_come_back(text: str) -> None:
    assert partition_text(parse_partition(text)) == text


@pytest.mark.parametrize(
    "text", ["", "shard:2", "shards:two", "shards:0", "iid:3", "iid/shards:2", "dirichlet", "dirichlet:-1"]
)
def test_wrong_texts_are_named(text: str) -> None:
    with pytest.raises(DataError, match=f"partition {text!r}"):
        parse_partition(text)


def test_a_hundred_thousand_clients_in_seconds() -> None:
    labels = np.arange(60_000) % 10
    data = samples_of(labels)
    began = time.process_time()
    split = partition(data, Dirichlet(alpha=0.1, min_size=0), 100_000, 10, 1)
    assert time.process_time() - began < 5
    check = np.sort(split.order)
    assert np.array_equal(check, np.arange(60_000))


def test_a_million_clients_in_seconds() -> None:
    data = samples_of(np.arange(1_200_000) % 10)
    for text in ("iid", "dirichlet:0.5"):
        began = time.process_time()
        assert len(partition(data, parse_partition(text), 1_000_000, 10, 1)) == 1_000_000
        assert time.process_time() - began < 10, text
