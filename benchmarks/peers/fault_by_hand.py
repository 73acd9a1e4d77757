"""Hand-written data parallel training with a checkpoint per epoch, for torchrun, as in PyTorch's tutorial."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fault_task import BATCH_A_PROCESS, EPOCHS, digits, finish, folder, network, note, optimizer, pictures
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    update = optimizer(model)
    data = digits()
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=BATCH_A_PROCESS, sampler=sampler)
    snapshot = folder() / "snapshot.pt"
    first = 0
    if snapshot.exists():
        state = torch.load(snapshot)
        model.module.load_state_dict(state["model"])
        update.load_state_dict(state["optimizer"])
        first = state["epochs"]
    step = first * len(loader)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            update.zero_grad()
            F.cross_entropy(model(pictures(images, step)), labels).backward()
            update.step()
            step += 1
            note(step)
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": update.state_dict(), "epochs": epoch + 1}
            torch.save(state, snapshot)
    finish(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
