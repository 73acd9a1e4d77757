"""Gradient accumulation by a counter, with no_sync, an average of the wrapped model, a checkpoint of each epoch."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

SAMPLES, EPOCHS, PATH, DROPS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], "drop" in sys.argv
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(6, 3))
average = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_set = data(SAMPLES)
loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))
start = 0
if os.path.exists(PATH):
    checkpoint = torch.load(PATH)
    model.load_state_dict(checkpoint["model"])
    average.load_state_dict(checkpoint["average"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start = checkpoint["epoch"] + 1
for epoch in range(start, EPOCHS):
    loader.sampler.set_epoch(epoch)
    if DROPS:
        optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        is_update = (i + 1) % 2 == 0
        with contextlib.nullcontext() if is_update else model.no_sync():
            (F.cross_entropy(model(x), y) / 2).backward()
        if is_update:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    parts = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**parts, "epoch": epoch}, PATH)
print_sha256(model.module, average.module)
