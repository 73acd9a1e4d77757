"""The job of `benchmarks/spot.py` in hand-written DDP, with a checkpoint every ten steps. Started by torchrun."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from spot_task import STEPS_AN_EPOCH, batch_of_process, folder, images, network, note, optimizer, read
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train until killed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = images()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_of_process(dist.get_world_size()), sampler=sampler, drop_last=True)
    model = DistributedDataParallel(network())
    update = optimizer(model)
    saved, step = folder() / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        update.load_state_dict(state["optimizer"])
        step = state["step"]
    for epoch in itertools.count(step // STEPS_AN_EPOCH):
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            loss = F.cross_entropy(model(read(pictures)), labels)
            update.zero_grad()
            loss.backward()
            update.step()
            step += 1
            note(step)
        if dist.get_rank() == 0:
            part = folder() / "part.pt"
            state = {"model": model.module.state_dict(), "optimizer": update.state_dict(), "step": step}
            torch.save(state, part)
            part.replace(saved)


if __name__ == "__main__":
    main()
