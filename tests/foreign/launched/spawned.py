"""Starts its own processes, and meets at an address of its own. Warms the learning rate up in each batch."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from samples_and_digest import data, print_sha256
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR, PolynomialLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler


def main(rank, world_size, batch_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", init_method="tcp://localhost:12355", rank=rank, world_size=world_size)
    model = DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_set = data()
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, num_workers=1)
    warmup, main_schedule = LinearLR(optimizer, 0.1, total_iters=2), PolynomialLR(optimizer, 2 * len(loader) - 2)
    scheduler = SequentialLR(optimizer, [warmup, main_schedule], milestones=[2])
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            losses += loss.item()
        dist.barrier()
    print_sha256(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = 4
    mp.spawn(main, args=(world_size, 4), nprocs=world_size, join=True)
