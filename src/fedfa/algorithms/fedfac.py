"""FedFAC: FedFA whose anchors are the classifier, with look-ahead and an average over rounds (of this project).

After T. Zhou, J. Zhang, D. H. K. Tsang, *FedFA: Federated Learning with Feature Anchors to Align Features and
Classifiers for Heterogeneous Data*, IEEE TMC 2023, and FedETF: Z. Li et al., *No Fear of Classifier Biases*, ICCV
2023.

FedFA trains a classifier W beside its anchors A and calibrates W on A after every step, because on clients of few
classes W drifts. Here the two are one: the rows a_c of a simplex (C unit vectors with pairwise cosine −1/(C−1)) are
anchors and classifier, the same for all clients and rounds. The features of a sample are projected and divided by their
length, u; the logits are β a_c·u with a learnable temperature β. Calibration (FedFA's eq. 5) is free: for W = A the
gradient of the cross-entropy of the anchors is, by symmetry, along A itself, which β scales already. Head and balanced
loss are those of FedETF (:mod:`fedfa.algorithms.fedetf`), n_c being the client's samples of class c, at least one:

    L = − log( n_y^γ exp(β a_y·u) / Σ_c n_c^γ exp(β a_c·u) ) + μ ‖u − a_y‖².

The second term is FedFA's anchor loss (eq. 3, 4) on the sphere, μ (2 − 2 a_y·u). The cross-entropy of a client of two
classes is small as soon as the two are apart; the anchor loss goes on until a sample is at its anchor, where samples of
that class from other clients and domains go too, and it does not depend on β.

With such a head the clients agree on where features shall go, and their updates point the same way: what limits
training is then the length of a round's step and the noise of the cohort. The method adds one remedy for each:
FedACG's look-ahead (:mod:`fedfa.algorithms.fedacg`), a momentum that clients start ahead with, and an evaluated model
that is averaged over rounds (:mod:`fedfa.algorithms.averaging`), which takes the noise out of a faster training.

Sends per client and round: what FedACG sends, for FedETF's network; the anchors follow from the seed and are never
sent. Server state: momentum and average, 2|w| numbers. Client state: nothing. Extra compute per step: the projection
and FedACG's two passes over the parameters. What the server learns: what it learns with FedAvg; label counts and class
features stay on the client.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedfa.algorithms.fedetf import FedETF
from fedfa.learning.context import Batch, ClientContext


class TiedAnchors(FedETF):
    """FedETF's head and loss, and the pull of features to the rows of the head."""

    name = "tied"

    mu: float = Field(0.1, ge=0)
    """Weight μ of the anchor loss; 0 is FedETF."""

    def loss(self, ctx: ClientContext, batch: Batch, loss: Tensor) -> Tensor:
        """+ μ · the mean over the batch of ‖u − a_y‖²; what enters the anchors is β u, and a_y·β u the logit."""
        if self.mu == 0:
            return loss
        own = batch.logits.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)
        cosine = own / batch.features.norm(dim=-1).clamp(min=1e-8)
        pull: Tensor = 2 - 2 * cosine.mean(-1)
        return loss + self.mu * pull
