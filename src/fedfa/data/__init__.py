"""Data sets, their partitions over clients, and the training loop's view of them."""

from fedfa.data.augmentation import AUGMENTATIONS, Augmentation
from fedfa.data.federation import ClientSamples, Federation, FederationOrigin, SplitSummary
from fedfa.data.loading import known_names, load
from fedfa.data.own_clients import federation_from
from fedfa.data.partitions.assignment import Partition
from fedfa.data.partitions.rules import number_of_clients, partition
from fedfa.data.partitions.specs import (
    AnyPartition,
    Classes,
    Dirichlet,
    Domains,
    Iid,
    Natural,
    PartitionSpec,
    Quantity,
    Shards,
    parse_partition,
    partition_text,
)
from fedfa.data.preprocessing import NORMALISATIONS, Normalisation, Preprocessing
from fedfa.data.samples import Columns, DataOrigin, DataSet, Samples
from fedfa.data.standardisation import Standardise
from fedfa.data.user_data import dataset_from

__all__ = [
    "AUGMENTATIONS",
    "NORMALISATIONS",
    "AnyPartition",
    "Augmentation",
    "Classes",
    "ClientSamples",
    "Columns",
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
    "Standardise",
    "dataset_from",
    "federation_from",
    "known_names",
    "load",
    "number_of_clients",
    "parse_partition",
    "partition",
    "partition_text",
]
