"""Networks, and their split into features and a linear classifier."""

from fedfa.models.reference import load_network, network_reference
from fedfa.models.split import SplitModel
from fedfa.models.zoo import MODELS, build_model

__all__ = ["MODELS", "SplitModel", "build_model", "load_network", "network_reference"]
