"""The job of `benchmarks/spot.py` in hand-written DDP with a checkpoint every ten steps. Started by torchrun."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.spot import GLOBAL_BATCH, SAMPLE_S

CHECKPOINT_STEPS = 10


def main() -> None:
    """Train until killed; rank 0 appends each step's number to a file."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, size = Path(os.environ["SPOT_FOLDER"]), GLOBAL_BATCH // dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshot, step = folder / "snapshot.pt", 0
    if snapshot.exists():
        state = torch.load(snapshot)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        time.sleep(size * SAMPLE_S)  # reading and computing
        loss = F.cross_entropy(model(torch.randn(size, 64)), torch.randint(0, 10, (size,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            with (folder / "steps").open("a", encoding="utf-8") as file:
                file.write(f"{step}\n")
            if step % CHECKPOINT_STEPS == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "part.pt")
                (folder / "part.pt").replace(snapshot)


if __name__ == "__main__":
    main()
