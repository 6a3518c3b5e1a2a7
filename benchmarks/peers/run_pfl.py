"""pfl-research: its FederatedAveraging on its SimulatedBackend, workers started by torchrun as documented.

torchrun --nproc-per-node 2 run_pfl.py --task cnn --rounds 7
"""

import argparse
import os
from importlib.metadata import version

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional

from benchmarks.bench.contender_api import TASKS, client_tensors, clock, network, report

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=TASKS, default="cnn")
parser.add_argument("--rounds", type=int, default=7)
options = parser.parse_args()
task = TASKS[options.task]
torch.set_num_threads(1)


class Net(torch.nn.Module):
    """The network with the two methods that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(task)

    def forward(self, x):
        """The scores of the classes."""
        return self.net(x)

    def loss(self, x, y):
        """The local loss."""
        return functional.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        """Required by pfl; nothing is evaluated here."""
        return {"loss": Weighted(functional.cross_entropy(self.net(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):
    """Records the end of each round."""

    def __init__(self) -> None:
        self.ends = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """After the server's step."""
        self.ends.append(clock())
        return False, Metrics()


np.random.seed(0)
torch.manual_seed(0)
data = dict(enumerate(client_tensors(task)))
sampler = get_user_sampler("minimize_reuse", list(data))
train = FederatedDataset(lambda user: PyTorchTensorDataset(data[user], user_id=str(user)), sampler)
net = Net()
watch = Clock()
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=options.rounds, evaluation_frequency=10**6, train_cohort_size=task.cohort,
        val_cohort_size=None,
    ),
    backend=SimulatedBackend(training_data=train, val_data=train),
    model=PyTorchModel(
        net,
        local_optimizer_create=lambda params, lr: torch.optim.SGD(params, lr=lr, weight_decay=task.weight_decay),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    ),
    model_train_params=NNTrainHyperParams(
        local_num_epochs=task.epochs, local_learning_rate=task.lr, local_batch_size=task.batch_size
    ),
    callbacks=[watch],
    send_metrics_to_platform=False,
)  # fmt: skip
if os.environ.get("RANK", "0") == "0":
    report(watch.ends, release=version("pfl"))
