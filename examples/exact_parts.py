"""A loop with mixed precision, clipping, a scheduler, EMA, workers, the loss of whole steps, and a stop by a signal.

python examples/exact_parts.py
torchrun --nproc-per-node 3 examples/exact_parts.py

SIGTERM saves and ends it after the current step; the next start resumes, on any number of processes.
"""

import os
import signal
import sys

import sklearn.datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import samebits

EPOCHS = 3
CHECKPOINT = "exact_parts.pt"
is_stopping = False


def stop(*_):
    global is_stopping
    is_stopping = True


def sum_over_ranks(*numbers):
    sums = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums.tolist()


signal.signal(signal.SIGTERM, stop)
torch.manual_seed(0)
images, labels = sklearn.datasets.load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1)
model, optimizer, loader = samebits.exact(model, optimizer, loader, global_batch=64, per_step=[ema])
scheduler = loader.per_step(OneCycleLR(optimizer, 4e-3, epochs=EPOCHS, steps_per_epoch=len(loader)))
parts = {"model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
is_main = int(os.environ.get("RANK", "0")) == 0

if os.path.exists(CHECKPOINT):
    for name, state in torch.load(CHECKPOINT, weights_only=True).items():
        parts[name].load_state_dict(state)

while loader.step < EPOCHS * len(loader):
    loss_sum, num_samples = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)

        if not loader.is_padding:  # a repeated micro-batch
            loss_sum, num_samples = loss_sum + loss.item() * len(x), num_samples + len(x)
        if loader.sync_gradients:
            step_loss, step_samples, num_stopping = sum_over_ranks(loss_sum, num_samples, is_stopping)
            loss_sum, num_samples = 0.0, 0
            if is_main and loader.step % 20 == 0:
                print(f"step {loader.step}: loss {step_loss / step_samples:.3f}")
            if num_stopping:
                if is_main:
                    torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)
                sys.exit(143)

if is_main:
    print(samebits.weights_sha256(ema.module.state_dict()))
