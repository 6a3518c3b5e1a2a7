"""Centralised training: all data at one site, as if there were no clients.

The upper end of comparisons, e.g. the centralised curves of Y. Zhao et al., *Federated Learning with Non-IID Data*,
arXiv:1806.00582, 2018. The samples of all clients lie in one place and are shuffled together. In each round that site
makes as many optimiser steps as the cohort that would have been drawn makes together, with the same batch size and
learning rate, so that a round costs the same and results can be compared round by round. Momentum starts anew in
each round, as it does on clients.

It goes with whatever else acts on the one site (a loss, a server's optimiser, CCVR); with one client in every round,
corrections of the drift between clients have nothing to correct.

Sends per client and round: in a federation it cannot be had; counted as FedAvg with one client. Server state: the
model. The site state: nothing between rounds. Extra compute: none. What the server learns: everything, all data are in
one place.
"""

from __future__ import annotations

from fedfa.learning.component import Component, Traits


class Centralised(Component):
    """Declare that the data are pooled."""

    name = "centralised"
    traits = Traits(
        pooled_data=True,
        excludes={
            "local": "where all data are in one place there are no clients to train alone; choose one of the two",
            "fedbn": "where all data are in one place there are no clients to keep normalisation layers of their own; "
            "leave out one of the two",
        },
    )
