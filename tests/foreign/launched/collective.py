"""Sums gradients by hand, divides the loss by a number that it sums over the processes, or gathers outputs for it."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader, DistributedSampler


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


dist.init_process_group("gloo")
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train_set = data(48)
loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set))
for x, y in loader:
    logits = model(x)
    loss = F.cross_entropy(logits, y, reduction="sum")
    if sys.argv[1] == "gathered":
        logits = Gather.apply(logits)
        loss = loss + logits.square().mean()
    count = torch.tensor(float(len(x)))
    if sys.argv[1] == "loss":
        dist.all_reduce(count)
    if sys.argv[1] == "log":
        total = count.clone()
        dist.all_reduce(total)
        print(total)
    optimizer.zero_grad()
    (loss / count).backward()
    if sys.argv[1] == "gradients":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
if sys.argv[1] == "state":
    dist.all_reduce(model.bias.data)
print_sha256(model)
