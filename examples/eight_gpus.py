"""An ordinary DistributedDataParallel script, written for eight GPUs: nothing in it knows Samebits.

    torchrun --nproc-per-node 8 examples/eight_gpus.py
    samebits launch --as 8 examples/eight_gpus.py

A CNN with batch norm on scikit-learn's digits. The learning rate and the length of an epoch follow the number of
processes, as in most published scripts. Run under torchrun on fewer GPUs, it trains another model.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def datasets():
    digits = load_digits()
    images = torch.tensor(digits.images).float().unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="per GPU")
    parser.add_argument("--lr", type=float, default=0.04, help="per GPU")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    train_set, val_set = datasets()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, 60, sampler=DistributedSampler(val_set, shuffle=False))
    model = DDP(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * world, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    start = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        start = saved["epoch"] + 1
    if rank == 0:
        print(f"{world} processes, learning rate {args.lr * world:g}, {len(loader)} steps an epoch", flush=True)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        hits = torch.zeros(2, device=device)
        with torch.no_grad():
            for x, y in val_loader:
                hits += torch.tensor([(model(x.to(device)).argmax(1).cpu() == y).sum(), len(y)], device=device)
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {100 * hits[0] / hits[1]:.2f}%", flush=True)
            if args.checkpoint:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch}, args.checkpoint)
    if rank == 0:
        tensors = model.module.state_dict().values()
        print("sha256", hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in tensors)).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
