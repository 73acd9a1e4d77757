"""Sets its learning rate by the loss of the epoch before."""

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(data(), batch_size=16, shuffle=True)
for _ in range(3):
    loss_sum = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
    optimizer.param_groups[0]["lr"] = 0.1 * loss_sum
print_sha256(model)
