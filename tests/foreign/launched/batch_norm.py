"""Shares the statistics of batch norm between the processes, or compresses gradients on their way."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
if int(os.environ["WORLD_SIZE"]) > 1 and sys.argv[1] == "norm":
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = DDP(model)
if sys.argv[1] == "hook":
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_set = data(48)
for x, y in DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set)):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
print_sha256(model.module)
