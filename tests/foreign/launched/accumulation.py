"""Gradient accumulation by a counter, with no_sync."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_set = data(48)
loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))
for i, (x, y) in enumerate(loader):
    is_update = (i + 1) % 2 == 0
    with contextlib.nullcontext() if is_update else model.no_sync():
        (F.cross_entropy(model(x), y) / 2).backward()
    if is_update:
        optimizer.step()
        optimizer.zero_grad()
print_sha256(model.module)
