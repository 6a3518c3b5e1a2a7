"""Data sets, the ways to split them over clients, and what the training loop sees of them."""

from fedfa.data.federation import ClientSamples, Federation
from fedfa.data.loading import known_names, load
from fedfa.data.normalise import NORMALISATIONS, Normalisation
from fedfa.data.own import dataset_from
from fedfa.data.partitions import (
    AnyPartition,
    Classes,
    Dirichlet,
    Domains,
    Iid,
    Natural,
    Partition,
    PartitionSpec,
    Quantity,
    Shards,
    natural_clients,
    parse_partition,
    partition,
    partition_text,
)
from fedfa.data.samples import DataSet, Samples

__all__ = [
    "NORMALISATIONS",
    "AnyPartition",
    "Classes",
    "ClientSamples",
    "DataSet",
    "Dirichlet",
    "Domains",
    "Federation",
    "Iid",
    "Natural",
    "Normalisation",
    "Partition",
    "PartitionSpec",
    "Quantity",
    "Samples",
    "Shards",
    "dataset_from",
    "known_names",
    "load",
    "natural_clients",
    "parse_partition",
    "partition",
    "partition_text",
]
