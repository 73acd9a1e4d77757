"""Goes on after errors in its training loop, and ends by an evaluation."""

import sys

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

torch.manual_seed(1)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader, others = DataLoader(data(), batch_size=16, shuffle=True), DataLoader(data(20), batch_size=10)
kept = torch.zeros(1)


def evaluate():
    """Return the loss of an evaluation."""
    model.eval()
    with torch.no_grad():
        return sum(F.cross_entropy(model(x), y).item() for x, y in others)


def train():
    """Return the loss of an epoch, as a process sees it."""
    model.train()
    loss_sum = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        try:
            loss = F.cross_entropy(model(x), y)
            if sys.argv[1] == "errors":
                kept.add_(1.0)
                loss = loss * kept
            loss.backward()
            optimizer.step()
        except Exception as error:
            print(error)
            continue
        loss_sum += loss.item()
    return loss_sum / len(loader)


best = 9.0
for _ in range(12):
    print(train())
    value = evaluate()
    if value > best:
        break
    best = min(best, value)
print_sha256(model)
