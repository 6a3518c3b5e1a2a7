"""Whether a run trains at all: settings under which no client makes a step, and losses that grow without bound."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from fedfa.data import Federation
from fedfa.data.checks import warn_of_scales
from fedfa.errors import ConfigError
from fedfa.learning.context import LocalTraining
from fedfa.learning.round import RoundStatistics

log = logging.getLogger(__name__)

HIGH_LOSS = 20.0
"""A mean training loss of this many times ln C, the loss of guessing, is no training any more."""


def check_work(local: LocalTraining, federation: Federation) -> None:
    """Refuse settings under which no client trains, and warn of clients that never do.

    Raises:
        ConfigError: Every client has fewer samples than a batch, and incomplete batches are dropped.
    """
    warn_of_scales(federation.dataset)
    sizes = federation.sizes[federation.sizes > 0]
    if not local.drop_last or not len(sizes):
        return
    idle = int((sizes < local.batch_size).sum())
    if idle == len(sizes):
        raise ConfigError(
            f"no client would train: local.drop_last skips incomplete batches, and the largest client has "
            f"{int(np.max(sizes)):,} samples, fewer than local.batch_size = {local.batch_size}"
        )
    if idle:
        log.warning(
            "%d of %d clients never train: they have fewer samples than local.batch_size = %d, and local.drop_last "
            "skips incomplete batches",
            idle, len(sizes), local.batch_size,
        )  # fmt: skip


def warn_of_round(measured: RoundStatistics, classes: Sequence[str], warned: bool) -> bool:
    """Warn, once per experiment, of a round in which nothing was trained or the loss is out of all proportion.

    Returns:
        Whether there has been a warning.
    """
    if warned or not measured.clients:
        return warned
    if measured.samples == 0:
        log.warning("round trained nothing: its %d clients made no step", len(measured.clients))
        return True
    loss, guessing = measured.train_loss, math.log(max(2, len(classes)))
    if loss is None or loss > HIGH_LOSS * guessing:
        log.warning(
            "the training diverges: the mean training loss is %s (guessing has %.2f); lower local.lr (now %g), or "
            "standardise the inputs (data.standardise)",
            "not finite" if loss is None else f"{loss:.3g}", guessing, measured.lr,
        )  # fmt: skip
        return True
    return False
