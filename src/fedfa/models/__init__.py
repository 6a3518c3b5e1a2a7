"""Networks, and the split of any network into features and a linear classifier."""

from fedfa.models.split import SplitModel
from fedfa.models.zoo import MODELS, build_model

__all__ = ["MODELS", "SplitModel", "build_model"]
