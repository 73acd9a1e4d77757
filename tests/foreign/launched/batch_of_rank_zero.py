"""Sends a number that rank 0 has drawn to all ranks in each body, as training with images of several sizes does."""

import torch
import torch.distributed as dist
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_set = data()
for x, _ in DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set)):
    scale = torch.rand(1)
    dist.broadcast(scale, src=0)
    optimizer.zero_grad()
    model(x * scale).square().mean().backward()
    optimizer.step()
print_sha256(model)
