"""Data sets, their partitions over clients, and the training loop's view of them."""

from fedfa.data.federation import ClientSamples, Federation, FederationOrigin
from fedfa.data.loading import known_names, load
from fedfa.data.normalise import NORMALISATIONS, Normalisation
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
    number_of_clients,
    parse_partition,
    partition,
    partition_text,
)
from fedfa.data.preprocessing import Preprocessing
from fedfa.data.samples import DataOrigin, DataSet, Samples
from fedfa.data.split_summary import SplitSummary
from fedfa.data.user_data import dataset_from

__all__ = [
    "NORMALISATIONS",
    "AnyPartition",
    "Classes",
    "ClientSamples",
    "DataOrigin",
    "DataSet",
    "Dirichlet",
    "Domains",
    "Federation",
    "FederationOrigin",
    "Iid",
    "Natural",
    "Normalisation",
    "Partition",
    "PartitionSpec",
    "Preprocessing",
    "Quantity",
    "Samples",
    "Shards",
    "SplitSummary",
    "dataset_from",
    "known_names",
    "load",
    "number_of_clients",
    "parse_partition",
    "partition",
    "partition_text",
]
