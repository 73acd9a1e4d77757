"""An AveragedModel, a GradScaler that is switched off, a scheduler of the epoch, DataParallel, no process group."""

import torch
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

model = nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
scaler = torch.amp.GradScaler("cuda", enabled=False)
train_loader = DataLoader(data(), batch_size=16, shuffle=True, drop_last=True)
test_loader = DataLoader(data(21), batch_size=8, shuffle=True)


def run(loader, is_training):
    model.train(is_training)
    total = 0.0
    with torch.set_grad_enabled(is_training):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if is_training:
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                ema.update_parameters(model.module)
            total += loss.item() * len(x)
    return total / len(loader.dataset)


for _ in range(3):
    run(train_loader, True)
    scheduler.step()
    print(f"test {run(test_loader, False):.4f}")
print_sha256(model.module, ema)
