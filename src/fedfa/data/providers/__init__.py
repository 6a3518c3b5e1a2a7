"""Network sources of data sets. Only these modules start anything that uses the network."""

from fedfa.data.providers.huggingface import HubDataset
from fedfa.data.providers.packages import DebianPackage, NpmPackage
from fedfa.data.providers.web import WebFiles

__all__ = ["DebianPackage", "HubDataset", "NpmPackage", "WebFiles"]
