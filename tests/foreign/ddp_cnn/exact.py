"""Train a small CNN on scikit-learn's digits with DistributedDataParallel.

torchrun --nproc-per-node 2 tests/foreign/ddp_cnn/usual.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samebits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Dropout(0.25), nn.Linear(32 * 16, 10))

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    train_set, val_set = TensorDataset(images[:1200], labels[:1200]), TensorDataset(images[1200:], labels[1200:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=128)

    model = Net()
    ddp_model = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    _, _, train_loader = samebits.exact(model, optimizer, train_loader, global_batch=64)
    scheduler = train_loader.per_step(OneCycleLR(optimizer, 0.1, epochs=args.epochs, steps_per_epoch=len(train_loader)))

    start_epoch = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch = state["epoch"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        ddp_model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp_model(x), y, label_smoothing=0.1)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {correct / len(val_set):.4f}")
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch + 1,
            }
            torch.save(state, args.checkpoint)

    if rank == 0:
        print("sha256", samebits.weights_sha256(model.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
