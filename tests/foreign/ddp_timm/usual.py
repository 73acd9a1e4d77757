"""Train a network of timm with its optimizers, schedules, mixup, average of the weights and clipping.

torchrun --nproc-per-node 2 tests/foreign/ddp_timm/usual.py
"""

import argparse
import os

import timm
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import samebits


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, lr_scheduler, model_ema, mixup_fn):
    model.train()
    num_updates = epoch * len(loader)
    for input, target in loader:
        input, target = mixup_fn(input, target)
        loss = loss_fn(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        model_ema.update(model)
        num_updates += 1
        lr_scheduler.step_update(num_updates=num_updates)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    torch.manual_seed(42 + dist.get_rank())
    digits = load_digits()
    images = torch.tensor(digits.images[:600, None] / 8 - 1).float()
    dataset = TensorDataset(torch.nn.functional.interpolate(images, size=32), torch.tensor(digits.target[:600]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)

    model = timm.create_model("test_vit", num_classes=10, in_chans=1, img_size=32, drop_path_rate=0.1)
    model_ema = ModelEmaV3(model, decay=0.95)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.8)
    model = NativeDDP(model)
    lr_scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=args.epochs, step_on_epochs=False, updates_per_epoch=len(loader), warmup_lr=1e-4
    )
    mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)

    start_epoch = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["state_dict"])
        model_ema.module.load_state_dict(state["state_dict_ema"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
        lr_scheduler.step_update(start_epoch * len(loader))

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader, optimizer, SoftTargetCrossEntropy(), lr_scheduler, model_ema, mixup_fn)
        if dist.get_rank() == 0:
            state = {"state_dict": model.state_dict(), "state_dict_ema": model_ema.module.state_dict()}
            torch.save({**state, "optimizer": optimizer.state_dict(), "epoch": epoch}, args.checkpoint)

    if dist.get_rank() == 0:
        print("sha256", samebits.weights_sha256(model_ema.module.state_dict()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
