"""Written for one process: opens a log, makes a folder when it first saves, and copies the best checkpoint."""

import os
import shutil
import sys

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

folder = os.path.join(sys.argv[1], "checkpoints")
log = open(os.path.join(sys.argv[1], "log.txt"), "w")  # noqa: SIM115
log.write("begin\n")
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data(32), batch_size=16, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if not os.path.isdir(folder):
        os.mkdir(folder)
    path = os.path.join(folder, f"{epoch}.pt")
    torch.save(model.state_dict(), path)
    shutil.copyfile(path, os.path.join(folder, "best.pt"))
    os.remove(path)
    log.write(f"epoch {epoch}\n")
log.close()
print_sha256(model)
