"""Your own training loop with Samebits's parts: equal weights at any number of processes and after any stop.

python examples/own_loop.py
torchrun --nproc-per-node 3 examples/own_loop.py
"""

from pathlib import Path

import sklearn.datasets
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samebits

with samebits.world(device="cpu") as world:
    torch.set_num_threads(1)  # kernels may split their sums by the number of threads
    torch.manual_seed(0)
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    pairs = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    data, val_data = (samebits.DatasetSamples(part) for part in torch.utils.data.random_split(pairs, [1437, 360]))

    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    reducer = samebits.Reducer(model, world)
    order = samebits.Order(num_samples=len(data), global_batch=64, micro_batch=8, seed=0)
    folder = Path("runs/own-loop")
    start = 0
    if checkpoint := samebits.load_newest_checkpoint(folder):
        model.load_state_dict(checkpoint.weights)
        optimizer.load_state_dict(checkpoint.optimizer)
        start = checkpoint.step

    for step in order.steps(world, start=start, stop=10 * order.steps_per_epoch):
        reducer.begin(step)
        for micro_batch in step.micro_batches:  # those of this rank
            batch = data.batch(micro_batch.indices, micro_batch.keys)
            with reducer.micro_batch(micro_batch):
                reducer.backward(F.cross_entropy(model(batch.inputs), batch.targets))
        reducer.reduce()  # every parameter's gradient, with equal bits at any world size
        optimizer.step()
        if world.is_main and (step.number + 1) % 50 == 0:
            checkpoint = samebits.Checkpoint(step.number + 1, model.state_dict(), optimizer.state_dict())
            samebits.save_checkpoint(checkpoint, folder)

    loss = lambda outputs, batch: {"loss": F.cross_entropy(outputs, batch.targets)}  # noqa: E731  # a loss in one line
    metrics, _ = samebits.evaluate_model(
        model, val_data, world, loss=loss, metric=lambda: samebits.Accuracy(10), batch_size=256
    )
    if world.is_main:
        print(metrics, samebits.weights_sha256(model.state_dict()))
