"""fedfa: federated learning on heterogeneous data.

>>> import fedfa
>>> settings = fedfa.Settings.preset("digits-c2", {"rounds": 2})
"""

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Intel's library of matrix products, which torch uses, otherwise adds in an order that depends on where in memory a
# matrix lies (seen on a processor with AVX2): the same client would end with other bits in another place of a stack.
# This way costs nothing measurable. It is read at the first product, so it must be said before that.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from fedfa.algorithms.method import Method
    from fedfa.algorithms.registry import register
    from fedfa.learning.part import Options, Part
    from fedfa.learning.sums import WeightedSum
    from fedfa.models.split import SplitModel
    from fedfa.studies.run import RunResult, run
    from fedfa.studies.settings import Settings

_PLACES = {
    "Method": "fedfa.algorithms.method",
    "register": "fedfa.algorithms.registry",
    "Options": "fedfa.learning.part",
    "Part": "fedfa.learning.part",
    "WeightedSum": "fedfa.learning.sums",
    "SplitModel": "fedfa.models.split",
    "RunResult": "fedfa.studies.run",
    "run": "fedfa.studies.run",
    "Settings": "fedfa.studies.settings",
}

__all__ = [
    "Method", "Options", "Part", "RunResult", "Settings", "SplitModel", "WeightedSum", "__version__", "register", "run",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import on first use: `import fedfa` alone does not load torch."""
    import importlib

    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fedfa' has no attribute {name!r}")
