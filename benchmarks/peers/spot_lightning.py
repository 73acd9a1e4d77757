"""The same job in Lightning, started by torchrun, with its checkpoints, resumed by ckpt_path="last"."""

from __future__ import annotations

import os

import lightning
import torch
from lightning_job import Job, make_trainer
from spot_task import batch_of_process, folder, images, network, note, optimizer, read
from torch.utils.data import DataLoader


def main() -> None:
    """Train until killed."""
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    num_procs = int(os.environ["WORLD_SIZE"])
    loader = DataLoader(images(), batch_of_process(num_procs), shuffle=True, drop_last=True)
    job = Job(network(), optimizer, lambda pictures, step: read(pictures))
    make_trainer(num_procs, -1, folder(), note).fit(job, loader, ckpt_path="last")


if __name__ == "__main__":
    main()
