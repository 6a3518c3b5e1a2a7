"""fedfa: federated learning on heterogeneous data.

>>> import fedfa
>>> config = fedfa.Config.preset("digits-c2", {"rounds": 2})
"""

import os
from typing import TYPE_CHECKING

__version__ = "0.2.0"

# Without it, the order of additions in MKL's matrix products depends on memory addresses (observed with AVX2): a client
# would get other bits at another position of a stack. The cost is not measurable. MKL reads the variable at the first
# product, so it is set before.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from fedfa import algorithms, data, errors
    from fedfa.algorithms.method import Method
    from fedfa.algorithms.registry import register
    from fedfa.data import DataSet, Federation
    from fedfa.errors import FedfaError
    from fedfa.experiment.config import Config
    from fedfa.experiment.experiment import Callback, Experiment
    from fedfa.experiment.record import RoundRecord
    from fedfa.experiment.run import RunResult, run
    from fedfa.experiment.saving import load
    from fedfa.learning.aggregate import Aggregate, WeightedSum
    from fedfa.learning.algorithm import Algorithm
    from fedfa.learning.component import Component, Traits
    from fedfa.learning.context import Batch, ClientContext, LocalTraining, Role, ServerStep, Task
    from fedfa.models.split import SplitModel
    from fedfa.report.compare import compare
    from fedfa.stacking.support import stackable

_MODULES = {
    "fedfa.algorithms.method": ("Method",),
    "fedfa.algorithms.registry": ("register",),
    "fedfa.data": ("DataSet", "Federation"),
    "fedfa.errors": ("FedfaError",),
    "fedfa.report.compare": ("compare",),
    "fedfa.experiment.config": ("Config",),
    "fedfa.experiment.experiment": ("Callback", "Experiment"),
    "fedfa.experiment.record": ("RoundRecord",),
    "fedfa.experiment.run": ("RunResult", "run"),
    "fedfa.experiment.saving": ("load",),
    "fedfa.learning.aggregate": ("Aggregate", "WeightedSum"),
    "fedfa.learning.algorithm": ("Algorithm",),
    "fedfa.learning.component": ("Component", "Traits"),
    "fedfa.learning.context": ("Batch", "ClientContext", "LocalTraining", "Role", "ServerStep", "Task"),
    "fedfa.models.split": ("SplitModel",),
    "fedfa.stacking.support": ("stackable",),
}
_SUBPACKAGES = ("algorithms", "data", "errors")

__all__ = [
    "Aggregate",
    "Algorithm",
    "Batch",
    "Callback",
    "ClientContext",
    "Component",
    "Config",
    "DataSet",
    "Experiment",
    "Federation",
    "FedfaError",
    "LocalTraining",
    "Method",
    "Role",
    "RoundRecord",
    "RunResult",
    "ServerStep",
    "SplitModel",
    "Task",
    "Traits",
    "WeightedSum",
    "__version__",
    "algorithms",
    "compare",
    "data",
    "errors",
    "load",
    "register",
    "run",
    "stackable",
]


def __getattr__(name: str) -> object:
    """Import on first use: `import fedfa` alone does not load torch."""
    import importlib

    if name in _SUBPACKAGES:
        return importlib.import_module(f"fedfa.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'fedfa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
