"""The job of `load_balance.py` in hand-written DDP: 192 samples a process and step. Started by torchrun."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.load_balance_recipe import GLOBAL_BATCH, network, pictures, pin


def main() -> None:
    """Train one epoch, and print the seconds at which each step ended, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pin()
    data = pictures()
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ends = []
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    if dist.get_rank() == 0:
        print(*ends)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
