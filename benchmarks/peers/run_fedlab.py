"""FedLab: its serial trainer and standalone pipeline.

    python run_fedlab.py --task cnn --rounds 6 --threads 2

Its data sets import torchvision, which is not needed here: an empty module replaces it.
"""

import argparse
import logging
import random
import sys
import types
import warnings
from importlib.metadata import version

import torch

from benchmarks.bench.contender_api import TASKS, client_tensors, clock, network, report

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=TASKS, default="cnn")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--threads", type=int, default=2)
options = parser.parse_args()
task = TASKS[options.task]
warnings.filterwarnings("ignore")

vision = types.ModuleType("torchvision")
vision.transforms = types.ModuleType("torchvision.transforms")
vision.datasets = types.ModuleType("torchvision.datasets")
vision.datasets.VisionDataset = object
sys.modules.update(
    {"torchvision": vision, "torchvision.transforms": vision.transforms, "torchvision.datasets": vision.datasets}
)

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline


class Batches:
    """Shuffled batches cut from whole tensors: faster than a DataLoader that collects single samples."""

    def __init__(self, x, y, size) -> None:
        self.x, self.y, self.size = x, y, size

    def __iter__(self):
        order = torch.randperm(len(self.y))
        for first in range(0, len(self.y), self.size):
            chosen = order[first : first + self.size]
            yield self.x[chosen], self.y[chosen]


class Data(FedDataset):
    """The clients' data in the form that FedLab requires."""

    def __init__(self) -> None:
        self.num = task.clients
        self.clients = client_tensors(task)

    def get_dataset(self, id, type="train"):
        """One client's samples."""
        return BaseDataset(*self.clients[id])

    def get_dataloader(self, id, batch_size, type="train"):
        """One client's batches."""
        return Batches(*self.clients[id], batch_size)


class Trainer(SGDSerialClientTrainer):
    """FedLab's trainer with weight decay, which its own set-up of the optimiser leaves out."""

    def setup_optim(self, epochs, batch_size, lr):
        """SGD with weight decay."""
        super().setup_optim(epochs, batch_size, lr)
        self.optimizer = torch.optim.SGD(self._model.parameters(), lr, weight_decay=task.weight_decay)


ends = []


class Handler(SyncServerHandler):
    """Records the end of each round."""

    def load(self, payload):
        """Add one client's result; return whether the round is complete."""
        done = super().load(payload)
        if done:
            ends.append(clock())
        return done


class Pipeline(StandalonePipeline):
    """Without evaluation."""

    def evaluate(self):
        """Do nothing; no contender is evaluated."""


random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(options.threads)
logging.disable(logging.INFO)
trainer = Trainer(network(task), task.clients, cuda=False)
trainer.setup_dataset(Data())
trainer.setup_optim(task.epochs, task.batch_size, task.lr)
Pipeline(Handler(network(task), options.rounds, task.cohort / task.clients, cuda=False), trainer).main()
report(ends, release=version("fedlab"))
