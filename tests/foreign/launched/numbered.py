"""Schedules, accumulation and the end by the number of enumerate(), or a loop that ends by a counter of its own."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train_set = data(80)
loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))


def train(x, y, is_update=True):
    """Train on a batch."""
    loss = F.cross_entropy(model(x), y)
    shown = loss.detach().clone()
    dist.all_reduce(shown)  # for the log, and after the loss
    loss.backward()
    if is_update:
        optimizer.step()
        optimizer.zero_grad()


def set_rate(rate):
    """Set the learning rate by hand."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def batches():
    """Yield batches without an end, and read one ahead."""
    while True:
        yield from loader


step = 0
if sys.argv[1] == "number":
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            if i >= 4:
                break
            set_rate(0.1 * 0.9 ** (epoch * len(loader) + i))
            train(x, y, is_update=i % 2 == 1)
            for group in optimizer.param_groups:
                group["momentum"] *= 0.95
elif sys.argv[1] == "counter":
    while step < 12:
        for x, y in loader:
            train(x, y)
            step += 1
elif sys.argv[1] == "clipped":
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        if step >= 12:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            print(step)
        step += 1
elif sys.argv[1] == "rate":
    for x, y in loader:
        train(x, y)
        step += 1
        set_rate(0.1 / step)
elif sys.argv[1] == "range":
    reader = batches()
    for _ in range(12):
        train(*next(reader))
elif sys.argv[1] == "ahead":
    before = None
    for batch in loader:
        if before is not None:
            train(*before)
        before = batch
print_sha256(model.module)
