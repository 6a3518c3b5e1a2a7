"""Places on the network that data sets come from. Only these modules start anything that talks to a network."""

from fedfa.data.providers.debian import DebianPackage
from fedfa.data.providers.huggingface import HubDataset
from fedfa.data.providers.npm import NpmPackage
from fedfa.data.providers.web import WebFiles

__all__ = ["DebianPackage", "HubDataset", "NpmPackage", "WebFiles"]
