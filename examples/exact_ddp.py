"""A usual training loop with equal weights at any number of processes, by one call.

python examples/exact_ddp.py
torchrun --nproc-per-node 3 examples/exact_ddp.py
"""

import sklearn.datasets
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import samebits

torch.manual_seed(0)
images, labels = sklearn.datasets.load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
train_data, val_data = random_split(digits, [1437, 360])

model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = DataLoader(train_data, batch_size=8, shuffle=True)
model, optimizer, loader = samebits.exact(model, optimizer, loader, global_batch=64)
val_loader = samebits.EvalLoader(DataLoader(val_data, batch_size=64))

for epoch in range(5):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            val_loader.add(correct=(model(x).argmax(1) == y).sum())
    correct = val_loader.sums()["correct"]  # on all ranks
    if val_loader.world.is_main:
        print(f"epoch {epoch}: accuracy {correct / len(val_data):.4f}")

if val_loader.world.is_main:
    print(samebits.weights_sha256(model.state_dict()))
