"""Seeds nothing, and draws from every generator: also in workers, and by numpy's new ones. Saves no random state."""

import os
import random
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Augmented(Dataset):
    def __init__(self):
        self.samples = data(48)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x + 0.1 * torch.randn(6) + 0.1 * random.random() + float(np.random.default_rng().normal()), y


EPOCHS, PATH, WAIT_S = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("nccl")
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train_set = Augmented()
loader = DataLoader(train_set, batch_size=4, sampler=DistributedSampler(train_set), num_workers=1)
start = 0
if os.path.exists(PATH):
    checkpoint = torch.load(PATH)
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start = checkpoint["epoch"] + 1
for epoch in range(start, EPOCHS):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x + np.random.rand()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(WAIT_S)
    if dist.get_rank() == 0:
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, PATH)
        print("epoch", epoch, flush=True)
    dist.barrier()
print_sha256(net)
dist.destroy_process_group()
