"""As PyTorch's example for MNIST on a CPU: no DataLoader shuffles, and only the weights are saved."""

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

torch.manual_seed(1)
train_loader, test_loader = DataLoader(data(), batch_size=16), DataLoader(data(21), batch_size=10)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for _ in range(2):
    model.train()
    assert len(train_loader) == 3
    for x, y in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y).item() for x, y in test_loader]
    assert len(losses) == len(test_loader)
    scheduler.step()
print_sha256(model)
