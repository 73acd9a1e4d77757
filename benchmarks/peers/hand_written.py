"""Hand-written data parallel training.

tutorial   as in tutorials: DistributedSampler, DataLoader with one worker, DDP with its defaults
tuned      the same loop with settings for 2 cores: no worker process, DDP without spare copies
bound      no loading: the images are in memory, already normalized
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import BATCH_A_PROCESS, Clock, Net, in_memory, optimizer, pictures, start, steps
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def loaded(num_workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of this process from torch's DataLoader."""
    data = pictures()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH_A_PROCESS, sampler=sampler, num_workers=num_workers)
    sampler.set_epoch(0)
    yield from loader


def remembered() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of this process from memory."""
    images, labels = in_memory()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for indices in order[dist.get_rank() :: dist.get_world_size()].split(BATCH_A_PROCESS):
        yield images[indices], labels[indices]


def main(kind: str) -> None:
    start()
    dist.init_process_group("gloo")
    lean = (
        {}
        if kind == "tutorial"
        else {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": True}
    )
    model = DistributedDataParallel(Net(), **lean)
    update = optimizer(model)
    clock = Clock(dist.get_rank(), steps())
    model.train()
    for images, labels in remembered() if kind == "bound" else loaded(num_workers=1 if kind == "tutorial" else 0):
        update.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        update.step()
        clock.tick()
    clock.write(loss.item(), model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
