"""Train a small vision transformer with warm-up, AdamW, bfloat16 autocast and an average of the weights.

torchrun --nproc-per-node 2 tests/foreign/ddp_vit/usual.py
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import samebits


class ViT(nn.Module):
    def __init__(self, patch=2, dim=32, depth=2, heads=4):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, (8 // patch) ** 2 + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def param_groups(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def train_one_epoch(model, optimizer, scheduler, ema, loader):
    model.train()
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--total-steps", type=int, default=26)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    torch.manual_seed(1)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.images / 8 - 1).float()[:800, None], torch.tensor(digits.target[:800]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)

    model = ViT()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=2e-3, betas=(0.9, 0.99))

    def lr_factor(step):
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        done = (step - args.warmup_steps) / max(1, args.total_steps - args.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    scheduler = LambdaLR(optimizer, lr_factor)
    model = DDP(model)

    start_epoch = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch = state["epoch"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, scheduler, ema, loader)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch + 1}, args.checkpoint)

    if dist.get_rank() == 0:
        print("sha256", samebits.weights_sha256(ema.module.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
