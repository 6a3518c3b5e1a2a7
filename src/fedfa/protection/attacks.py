"""Attackers among simulated clients: what they train on, and what they send.

An attack that changes contributions acts where the server collects them, because the strongest ones look at the honest
contributions first. It sees everything as changes: of the model, of the anchors against those that were received.

- sign-flip: −scale · own change.
- scaling: scale · own change.
- alie: mean − z · standard deviation of the honest changes, coordinate by coordinate, with the largest z that still
  hides among them (M. Baruch, G. Baruch, Y. Goldberg, *A Little Is Enough*, NeurIPS 2019).
- inner-product: −scale · mean of the honest changes (C. Xie, O. Koyejo, I. Gupta, *Fall of Empires*, UAI 2019).
- anchor-poisoning: the anchor of class ``source`` is moved onto that of ``target``; everything else is honest.
- label-flip: trains on labels y → C − 1 − y.
- backdoor: trains on pictures with a patch, labelled ``target`` (E. Bagdasaryan et al., *How To Backdoor Federated
  Learning*, AISTATS 2020). With ``scale``, the changes of this and of label-flip are multiplied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fedfa.data import DataSet, Federation, Samples
from fedfa.errors import ConfigError
from fedfa.learning.aggregate import Aggregate, Contribution
from fedfa.learning.component import Protection, Traits
from fedfa.learning.context import ServerStep, Task
from fedfa.learning.random import stream
from fedfa.learning.tensors import Tensors
from fedfa.protection.changes import changes_of, received, with_changes
from fedfa.protection.settings import AttackConfig, AttackName

NAME = "attack"
_SCALES = {"sign-flip": 1.0, "scaling": 10.0, "inner-product": 0.5}


def attackers(config: AttackConfig, clients: int, seed: int) -> list[int]:
    """The clients that attack, in order.

    Example:
        >>> attackers(AttackConfig(kind="sign-flip", share=0.5), 4, seed=1)
        [2, 3]
    """
    if config.kind == "none":
        return []
    chosen = stream(seed, "attackers").choice(clients, round(config.share * clients), replace=False)
    return sorted(int(client) for client in chosen)


class Attack(Protection):
    """Replaces what the attackers send."""

    name = NAME
    traits = Traits(single_contributions=True)

    kind: AttackName = "sign-flip"
    """What they do."""
    scale: float | None = None
    """Strength; left out, the kind's own."""
    source: int = 0
    """anchor-poisoning: the class whose anchor is moved."""
    target: int = 1
    """anchor-poisoning: onto whose anchor."""
    clients: tuple[int, ...] = ()
    """The attackers."""
    states: Mapping[str, str] = {}
    """Groups that become a component's state, with its name."""

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """No state; anchors can only be poisoned where there are some, of both classes."""
        if self.kind == "anchor-poisoning":
            if not self.states:
                raise ConfigError(
                    'attack.kind = "anchor-poisoning" needs an algorithm whose clients send anchors or prototypes, '
                    "such as fedfa"
                )
            if max(self.source, self.target) >= task.num_classes:
                raise ConfigError(
                    f"attack.source = {self.source}, attack.target = {self.target}: classes are counted from 0 to "
                    f"{task.num_classes - 1}"
                )
        return {}

    def combine(self, server: ServerStep) -> None:
        """The same contributions with those of the attackers replaced."""
        each, members = server.aggregate.each, server.aggregate.members
        bad = [position for position, client in enumerate(members) if client in self.clients]
        if not bad:
            return
        honest = [each[position] for position in range(len(each)) if position not in bad] or each
        changed = Aggregate(keep_each=True)
        for position, contribution in enumerate(each):
            if position in bad:
                contribution = self._malicious(contribution, honest, len(bad), server)
            changed.add(contribution, members[position])
        server.aggregate = changed

    def _malicious(
        self, own: Contribution, honest: Sequence[Contribution], attackers: int, server: ServerStep
    ) -> Contribution:
        sent: Contribution = {}
        for group, entry in own.items():
            reference = received(group, self.states, server.state)
            mine = changes_of(entry, reference)
            others = [changes_of(one[group], reference) for one in honest if group in one] or [mine]
            if self.kind == "anchor-poisoning":
                lies = self._moved(mine, reference) if group in self.states else mine
            else:
                lies = {name: self._lie(mine[name], [one[name] for one in others], attackers) for name in mine}
            sent[group] = with_changes(entry, lies, reference)
        return sent

    def _lie(self, mine: Tensor, honest: Sequence[Tensor], attackers: int) -> Tensor:
        factor = self.scale or _SCALES.get(self.kind, 1.0)
        if self.kind == "sign-flip":
            return -factor * mine
        if self.kind in ("scaling", "backdoor", "label-flip"):
            return factor * mine
        others = torch.stack(list(honest))
        if self.kind == "inner-product":
            return -factor * others.mean(0)
        z = self.scale or hidden_deviations(len(honest) + attackers, attackers)
        return others.mean(0) - z * others.std(0, correction=0)

    def _moved(self, mine: Tensors, reference: Tensors) -> Tensors:
        """The change that puts one row of the received state onto another."""
        moved = {}
        for name, change in mine.items():
            state = reference[name].to(change)
            moved[name] = change.clone()
            moved[name][self.source] = (self.scale or 1.0) * (state[self.target] - state[self.source])
        return moved


def hidden_deviations(clients: int, attackers: int) -> float:
    """ALIE's z: so many standard deviations from the mean, enough honest clients are farther away than the attackers.

    Example:
        >>> round(hidden_deviations(50, 24), 2)  # the paper's example of 50 workers with 24 corrupted
        1.43
    """
    needed = clients // 2 + 1 - attackers  # honest ones that must look like supporters
    share = (clients - attackers - needed) / (clients - attackers)
    return max(0.0, NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6)))


# -- data ---------------------------------------------------------------------------------------------------------
def poisoned(federation: Federation, config: AttackConfig, clients: Sequence[int], seed: int) -> Federation:
    """The federation with the attackers' samples changed; all others, and the test set, as they are.

    Raises:
        ConfigError: A patch needs pictures; or there is no such class.
    """
    dataset = federation.dataset
    positions = {client: own for client in clients if len(own := federation.client(client).positions)}
    if not positions:
        return federation
    if config.kind == "label-flip":
        labels, chosen = dataset.train.labels.clone(), torch.cat(list(positions.values()))
        labels[chosen] = dataset.num_classes - 1 - labels[chosen]
        train = replace(dataset.train, labels=labels)
    else:
        if config.target >= dataset.num_classes:
            raise ConfigError(f"attack.target = {config.target}, but the data have {dataset.num_classes} classes")
        chosen = torch.cat([
            own[torch.from_numpy(stream(seed, "backdoor", client).permutation(len(own)))[: _share(config, len(own))]]
            for client, own in positions.items()
        ])  # fmt: skip
        marked = patched(dataset, dataset.train.inputs[chosen]) if dataset.train.is_image else _refuse_patches()
        inputs, labels = dataset.train.inputs.clone(), dataset.train.labels.clone()
        inputs[chosen] = marked
        labels[chosen] = config.target
        train = replace(dataset.train, inputs=inputs, labels=labels)
    changed = copy.copy(federation)
    changed.dataset, changed.origin = replace(dataset, train=train), None  # it cannot be loaded again like this
    return changed


def _share(config: AttackConfig, samples: int) -> int:
    return math.ceil(config.poisoned * samples)


def _refuse_patches() -> NoReturn:
    raise ConfigError('attack.kind = "backdoor" puts a patch on pictures, but these data are not pictures')


def patched(dataset: DataSet, inputs: Tensor) -> Tensor:
    """Pictures with a white square in the lower right corner, a seventh of the side and at least two pixels wide."""
    if not dataset.train.is_image:
        _refuse_patches()
    side = max(2, min(inputs.shape[1:3]) // 7)
    marked = inputs.clone()
    marked[:, -side:, -side:] = 255
    return marked


def triggered(dataset: DataSet, target: int) -> Samples:
    """The test pictures of other classes with the patch, labelled as the attacker wants: accuracy is his success."""
    others = (dataset.test.labels != target).nonzero().squeeze(1)
    labels = torch.full((len(others),), target, dtype=torch.int64)
    return Samples(patched(dataset, dataset.test.inputs[others]), labels)
