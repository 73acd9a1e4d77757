"""As ImageNet scripts do: batch size divided by the world, learning rate multiplied by it, reduced meters.

All ranks save the checkpoint, an evaluation drops the rest and reads it from another DataLoader, and a learning rate
that is set in each epoch follows the world.
"""

import argparse
import os

import torch
import torch.distributed as dist
from samples_and_digest import data, print_sha256
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()


def evaluate(loader):
    with torch.no_grad():
        for images, target in loader:
            correct = (model(images).argmax(1) == target).float().mean()
            top1.update(correct.item(), len(target))


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--resume", default="")
args = parser.parse_args()
args.world_size = int(os.environ["WORLD_SIZE"])
args.distributed = args.world_size > 1
if args.distributed:
    dist.init_process_group("gloo", init_method="env://", world_size=args.world_size, rank=int(os.environ["RANK"]))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
args.batch_size = int(args.batch_size / args.world_size)
if args.distributed:
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.02 * args.world_size, momentum=0.9, weight_decay=1e-4)
train_set, val_set = data(), data(21)
train_sampler = DistributedSampler(train_set) if args.distributed else None
val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True) if args.distributed else None
train_loader = DataLoader(train_set, args.batch_size, shuffle=(train_sampler is None), sampler=train_sampler)
val_loader = DataLoader(val_set, args.batch_size, shuffle=False, sampler=val_sampler)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=len(train_loader))
start_epoch = 0
if args.resume and os.path.isfile(args.resume):
    checkpoint = torch.load(args.resume)
    start_epoch = checkpoint["epoch"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])

for epoch in range(start_epoch, args.epochs):
    if args.distributed:
        train_sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["weight_decay"] = 1e-4 * dist.get_world_size() / (epoch + 1)
    model.train()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        with torch.inference_mode():
            hits = (output.argmax(1) == target).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if i % 10 == 0 and args.distributed:
            reduced = loss.detach().clone()
            dist.all_reduce(reduced)
    model.eval()
    top1 = AverageMeter()
    evaluate(val_loader)
    if args.distributed:
        top1.all_reduce()
        if len(val_sampler) * args.world_size < len(val_set):
            rest = Subset(val_set, range(len(val_sampler) * args.world_size, len(val_set)))
            evaluate(DataLoader(rest, args.batch_size))
    assert top1.count == len(val_set)
    if args.resume:
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict()}, args.resume)
print_sha256(getattr(model, "module", model))
