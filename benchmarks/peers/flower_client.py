"""The ClientApp of the Flower contender, in a separate module as `flwr new` generates it."""

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional

from benchmarks.bench.contender_api import TASKS, client_tensors, network

task = TASKS[os.environ["BENCH_TASK"]]
client = ClientApp()
data = []  # loaded once per Ray actor, as Flower's quickstart does


@client.train()
def train(msg: Message, context: Context) -> Message:
    """Train one client."""
    torch.set_num_threads(1)
    if not data:
        data.extend(client_tensors(task))
    x, y = data[context.node_config["partition-id"]]
    model = network(task)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    for _ in range(task.epochs):
        order = torch.randperm(len(y))
        for first in range(0, len(y), task.batch_size):
            chosen = order[first : first + task.batch_size]
            loss = functional.cross_entropy(model(x[chosen]), y[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})})
    return Message(content=content, reply_to=msg)
