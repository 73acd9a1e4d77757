"""Loops with a habit each: train() inside, a random subset, an own scheduler, a number that divides and sets a rate."""

import copy
import sys

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader, SubsetRandomSampler

HABIT = sys.argv[1]


class TriangleScheduler:
    """Sets the rate of an optimizer after each batch."""

    def __init__(self, optimizer, length):
        self.optimizer, self.length, self.number = optimizer, length, 0

    def step(self):
        self.number += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.2 * (1 - abs(2 * self.number / self.length - 1))


def set_rate(optimizer, number):
    """Set the rate of an optimizer by the number of a batch, as a warm-up does."""
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 + number)


torch.manual_seed(1)
network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
model = torch.nn.DataParallel(network)
if HABIT == "copied":
    model = copy.deepcopy(model)
sampler = SubsetRandomSampler(range(5, 37)) if HABIT == "subset" else None
loader = DataLoader(data(), batch_size=16, shuffle=sampler is None, sampler=sampler, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = TriangleScheduler(optimizer, 3 * len(loader)) if HABIT == "scheduler" else None
for epoch in range(3):
    if HABIT != "train":
        model.train()
    loss_sum = 0.0
    for number, (x, y) in enumerate(loader):
        model.train()
        if HABIT == "rate":
            set_rate(optimizer, number + epoch * len(loader))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        loss_sum += loss.item()
        print(loss_sum / (number + 1))
    model.eval()
if HABIT == "copied":
    torch.save(model, sys.argv[2])
    model = torch.load(sys.argv[2], weights_only=False)
print_sha256(model)
