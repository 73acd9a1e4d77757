"""Reads two DataLoaders at once, as semi-supervised training does, or a batch of another one to show it."""

import sys

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labeled = DataLoader(data(), batch_size=4, shuffle=True)
unlabeled = DataLoader(data(36), batch_size=4, shuffle=sys.argv[1] != "in order")


def train(x, y, other):
    """Train on a batch of each."""
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) + model(other).square().mean()).backward()
    optimizer.step()


if sys.argv[1] == "shown":
    for x, y in labeled:
        train(x, y, x)
        print(model(next(iter(unlabeled))[0]))
else:
    for (x, y), (other, _) in zip(labeled, unlabeled, strict=False):
        train(x, y, other)
print_sha256(model)
