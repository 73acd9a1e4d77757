"""Segment synthetic shapes with a small U-Net: cross-entropy and Dice loss, each with a backward pass of its own.

torchrun --nproc-per-node 2 tests/foreign/ddp_unet/usual.py
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import samebits


class Shapes(Dataset):
    """Images with a bright disc, and the disc's mask."""

    def __init__(self, length, size=16):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        x, y, radius = *random.uniform(4, self.size - 4, 2), random.uniform(2, 5)
        grid = np.mgrid[: self.size, : self.size]
        mask = (grid[0] - y) ** 2 + (grid[1] - x) ** 2 < radius**2
        image = mask + random.normal(0, 0.5, mask.shape)
        return torch.tensor(image, dtype=torch.float32)[None], torch.tensor(mask, dtype=torch.long)


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.middle = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2)], 1))
        return self.out(self.up1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)))


def dice_loss(logits, target):
    probability = logits.softmax(1)[:, 1]
    overlap = (probability * target).sum((1, 2))
    return 1 - ((2 * overlap + 1) / (probability.sum((1, 2)) + target.sum((1, 2)) + 1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=4, help="steps")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(2)
    dataset = Shapes(160)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    net = UNet()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9)
    epoch_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = 0
    model = DDP(net)
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        epoch_scheduler.load_state_dict(state["scheduler"])
        step = state["step"]

    for epoch in range(epoch_scheduler.last_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for image, mask in loader:
            optimizer.zero_grad()
            logits = model(image)
            F.cross_entropy(logits, mask).backward(retain_graph=True)
            dice_loss(logits, mask).backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            optimizer.step()
            step += 1
            if step % args.save_every == 0 and dist.get_rank() == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**state, "scheduler": epoch_scheduler.state_dict()}, args.checkpoint)
        epoch_scheduler.step()

    if dist.get_rank() == 0:
        print("sha256", samebits.weights_sha256(net.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
