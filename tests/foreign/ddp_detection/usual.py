"""Detect bright squares: targets of different lengths, a collate function, random augmentation and DataLoader workers.

torchrun --nproc-per-node 2 tests/foreign/ddp_detection/usual.py
"""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import samebits


class Squares(Dataset):
    def __init__(self, length, size=24):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        scene = np.random.default_rng(index)
        image = scene.normal(0, 0.1, (self.size, self.size)).astype(np.float32)
        boxes = []
        for _ in range(scene.integers(0, 4)):
            x, y = scene.integers(0, self.size - 6, 2)
            side = scene.integers(3, 6)
            image[y : y + side, x : x + side] += 1
            boxes.append([x, y, x + side, y + side])
        boxes = np.array(boxes, np.float32).reshape(-1, 4)
        if np.random.rand() < 0.5:
            image = image[:, ::-1]
            boxes = np.stack([self.size - boxes[:, 2], boxes[:, 1], self.size - boxes[:, 0], boxes[:, 3]], 1)
        image = image * random.uniform(0.8, 1.2) + np.random.normal(0, 0.02, image.shape).astype(np.float32)
        return torch.from_numpy(image.copy())[None], torch.from_numpy(boxes)


def collate(batch):
    images, boxes = zip(*batch, strict=True)
    return torch.stack(images), list(boxes)


class Detector(nn.Module):
    """One prediction for each cell of 4 x 4 pixels: whether a square's center is there, and its box."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        )  # fmt: skip
        self.objectness = nn.Conv2d(32, 1, 1)
        self.box = nn.Conv2d(32, 4, 1)

    def forward(self, images, targets):
        features = self.backbone(images)
        score, box = self.objectness(features)[:, 0], self.box(features)
        wanted = torch.zeros_like(score)
        box_loss = 0.0 * box.sum()
        for number, boxes in enumerate(targets):
            centers = ((boxes[:, :2] + boxes[:, 2:]) / 8).long()
            wanted[number, centers[:, 1], centers[:, 0]] = 1
            predicted = box[number, :, centers[:, 1], centers[:, 0]].T
            box_loss = box_loss + F.smooth_l1_loss(predicted, boxes / 24, reduction="sum")
        return {"objectness": F.binary_cross_entropy_with_logits(score, wanted), "box": box_loss / len(images)}


def train_one_epoch(model, optimizer, loader, rank, epoch):
    model.train()
    for step, (images, targets) in enumerate(loader):
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"epoch {epoch} {step}: " + " ".join(f"{k} {v.item():.4f}" for k, v in loss_dict.items()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--workers", default=1, type=int)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(3)

    dataset = Squares(180)
    train_sampler = DistributedSampler(dataset, shuffle=True)
    data_loader = DataLoader(
        dataset, batch_size=4, sampler=train_sampler, num_workers=args.workers, collate_fn=collate, drop_last=True
    )
    model = Detector()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    model_without_ddp = model
    model = DistributedDataParallel(model)

    first_epoch = 0
    if os.path.isfile(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
        first_epoch = checkpoint["epoch"] + 1

    for epoch in range(first_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, data_loader, rank, epoch)
        lr_scheduler.step()
        checkpoint = {
            "model": model_without_ddp.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
        }
        if rank == 0:
            torch.save(checkpoint, args.checkpoint)

    if rank == 0:
        print("sha256", samebits.weights_sha256(model_without_ddp.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
