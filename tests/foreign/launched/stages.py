"""Trains on a DataLoader, then on another one of other sizes."""

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
small, large = DataLoader(data(20), batch_size=16, shuffle=True), DataLoader(data(), batch_size=16, shuffle=True)
for loader in (small, large):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
print_sha256(model)
