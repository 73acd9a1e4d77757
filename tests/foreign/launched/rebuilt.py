"""Makes its DataLoaders in each epoch, by one function, and steps a schedule of the epochs."""

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def make_loader(num, is_training):
    return DataLoader(data(num), batch_size=16, shuffle=is_training)


for _ in range(3):
    train_loader, test_loader = make_loader(48, True), make_loader(20, False)
    assert len(train_loader) == 3
    for x, y in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert sum(len(x) for x, _ in test_loader) == 20
    scheduler.step()
print_sha256(model)
