"""SHA-256 of the arrays of the known data sets, as stored: ``uint8 [N, H, W, C]`` and little-endian ``int64``."""

import json
from collections.abc import Mapping
from importlib import resources

CHECKSUMS: Mapping[str, Mapping[str, str]] = json.loads(
    resources.files("fedfa.data.sets").joinpath("checksums.json").read_text("utf-8")
)
