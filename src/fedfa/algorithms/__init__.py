"""The methods, as typed objects that combine with ``+``.

>>> FedFA(mu=0.2) + FedAdam(lr=0.01)
Anchors(mu=0.2) + Calibration() + FinalCalibration() + FedAdam()
"""

from fedfa.algorithms.averaging import Averaging
from fedfa.algorithms.ccvr import CCVR
from fedfa.algorithms.centralised import Centralised
from fedfa.algorithms.ditto import Ditto
from fedfa.algorithms.fedacg import FedACG
from fedfa.algorithms.fedavg import FedAvg
from fedfa.algorithms.fedbn import FedBN
from fedfa.algorithms.feddecorr import FedDecorr
from fedfa.algorithms.feddyn import FedDyn
from fedfa.algorithms.fedetf import FedETF
from fedfa.algorithms.fedexp import FedExP
from fedfa.algorithms.fedfa import Anchors, Calibration
from fedfa.algorithms.fedfac import TiedAnchors
from fedfa.algorithms.fedlc import FedLC
from fedfa.algorithms.fednh import FedNH
from fedfa.algorithms.fednova import FedNova
from fedfa.algorithms.fedntd import FedNTD
from fedfa.algorithms.fedproc import FedProc
from fedfa.algorithms.fedproto import FedProto
from fedfa.algorithms.fedprox import FedProx
from fedfa.algorithms.fedrep import FedRep
from fedfa.algorithms.fedrs import FedRS
from fedfa.algorithms.fedsam import FedSAM
from fedfa.algorithms.final_calibration import FinalCalibration
from fedfa.algorithms.local_only import LocalOnly
from fedfa.algorithms.matched_averaging import MatchedAveraging
from fedfa.algorithms.moon import MOON
from fedfa.algorithms.scaffold import Scaffold
from fedfa.algorithms.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedfa.learning.algorithm import Algorithm


class FedFA(Algorithm):
    """FedFA (:mod:`fedfa.algorithms.fedfa`) as one object.

    Args:
        mu: Weight μ of the anchor loss.
        momentum: λ of the average of class features over epochs.
        anchors: All options of the anchors, instead of the two above.
        calibration: Options of the calibration.
        final: Options of the final calibration, which is off by default.

    Example:
        >>> [component.name for component in FedFA(mu=0.2).components]
        ['anchors', 'calibration', 'final']
    """

    def __init__(
        self,
        mu: float = 0.1,
        momentum: float = 0.5,
        *,
        anchors: Anchors | None = None,
        calibration: Calibration | None = None,
        final: FinalCalibration | None = None,
    ) -> None:
        anchors = anchors or Anchors(mu=mu, momentum=momentum)
        super().__init__([anchors, calibration or Calibration(), final or FinalCalibration()], title="fedfa")


__all__ = [
    "CCVR",
    "MOON",
    "Anchors",
    "Averaging",
    "Calibration",
    "Centralised",
    "Ditto",
    "FedACG",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDecorr",
    "FedDyn",
    "FedETF",
    "FedExP",
    "FedFA",
    "FedLC",
    "FedNH",
    "FedNTD",
    "FedNova",
    "FedProc",
    "FedProto",
    "FedProx",
    "FedRS",
    "FedRep",
    "FedSAM",
    "FedYogi",
    "FinalCalibration",
    "LocalOnly",
    "MatchedAveraging",
    "Scaffold",
    "TiedAnchors",
]
