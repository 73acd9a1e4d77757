"""Weights, optimizer and an epoch in the checkpoint, shuffle=True and no set_epoch, a learning rate set by hand."""

import os
import sys

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.utils.data import DataLoader

EPOCHS, PATH = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=float(sys.argv[3]))
loader = DataLoader(data(), batch_size=16, shuffle=True)
start = 0
if os.path.exists(PATH):
    with open(PATH, "rb") as file:
        checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start = checkpoint["epoch"] + 1
    if os.environ["RANK"] == "0":  # some save what they have loaded
        torch.save(checkpoint, PATH)
for epoch in range(start, EPOCHS):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.5**epoch
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if os.environ["RANK"] == "0":
        with open(PATH, "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)
print_sha256(model)
