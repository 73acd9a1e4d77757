"""Hands a hidden state or a counter on from one batch to the next, or draws samples on rank 0 first."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
train_set = data(32)
model = DDP(torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(6, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hidden = torch.zeros(4, 6)
for i, (x, y) in enumerate(DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))):
    if sys.argv[1] == "draws" and dist.get_rank() == 0:
        print(torch.randn(2))
    if sys.argv[1] == "hidden":
        x = x + hidden
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    (loss / (i + 1) if sys.argv[1] == "counter" else loss).backward()
    optimizer.step()
    hidden = 0.5 * x
print_sha256(model.module)
