"""``anchors.init = "fedavg"``: the first round trains as FedAvg does and only gathers the class features."""

from __future__ import annotations

import torch

from fedfa.algorithms import Anchors
from fedfa.learning.aggregate import Aggregate
from fedfa.learning.context import Batch, ClientContext, LocalTraining, ServerStep
from fedfa.learning.random import stream
from fedfa.learning.tensors import Tensors
from fedfa.models.split import SplitModel


def client(features: list[list[float]], labels: list[int], broadcast: Tensors) -> ClientContext:
    """A client whose single batch of the epoch has these features."""
    y = torch.tensor(labels)
    return ClientContext(
        client=0, round=0, rounds=1, parameters={},
        model=SplitModel.of(torch.nn.Linear(2, 3)), start={}, broadcast={"anchors": broadcast},
        client_state={},
        local=LocalTraining(), size=len(y), num_classes=3,
        count_labels=lambda: torch.bincount(y, minlength=3),
        make_rng=lambda: stream(0, "test"), batches_per_epoch=1,
        data=Batch(y, y, y, torch.tensor(features), torch.zeros(len(y), 3)),
    )  # fmt: skip


def test_anchors_after_the_round_are_the_true_class_means_and_unseen_classes_keep_theirs() -> None:
    """By hand: class 0 has features (1, 1), (3, 1) on one client and (5, 4) on the other: mean (3, 2).

    Class 1 is only on the second client: (0, 6). Class 2 has no samples and keeps the row it started with. Neither the
    momentum, nor the placeholder rows that were received, nor the clients' sizes enter, whatever the options say.
    """
    component = Anchors(initial="fedavg", weights="size", start="received", absent="keep", momentum=0.9)
    state = {"anchors": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])}
    total = Aggregate()
    for features, labels in (([[1.0, 1.0], [3.0, 1.0]], [0, 0]), ([[5.0, 4.0], [0.0, 6.0]], [0, 1])):
        ctx = client(features, labels, state)
        component.begin(ctx)
        loss = torch.tensor(2.5)
        assert component.loss(ctx, ctx.data, loss) is loss, "no anchor loss in the gathering round"
        component.after_step(ctx, ctx.data)
        component.after_epoch(ctx)
        total.add({f"anchors/{group}": sums for group, sums in component.contribute(ctx).items()})
    server = ServerStep(
        round=0, model={}, state={"anchors": dict(state)}, aggregate=total, num_clients=2, roles={}, rng=stream(0, "t")
    )
    component.step(server)
    expected = torch.tensor([[3.0, 2.0], [0.0, 6.0], [0.5, 0.5]])
    torch.testing.assert_close(server.state["anchors"]["anchors"], expected)
    assert not component.in_use(round=0)
    assert component.in_use(round=1)
