"""The task with Accelerate in a custom training loop."""

from __future__ import annotations

import os

import torch.nn.functional as F
from accelerate import Accelerator
from task import BATCH_A_PROCESS, Clock, Net, optimizer, pictures, start, steps
from torch.utils.data import DataLoader


def main() -> None:
    start()
    accelerator = Accelerator(cpu=True)
    workers = int(os.environ["BENCH_WORKERS"])
    model = Net()
    model, update, loader = accelerator.prepare(
        model,
        optimizer(model),
        DataLoader(pictures(), batch_size=BATCH_A_PROCESS, shuffle=True, num_workers=workers),
    )
    if accelerator.num_processes != int(os.environ["BENCH_PROCS"]):
        raise SystemExit(f"Accelerate runs {accelerator.num_processes} processes")
    clock = Clock(accelerator.process_index, steps())
    model.train()
    for images, labels in loader:
        update.zero_grad()
        loss = F.nll_loss(model(images), labels)
        accelerator.backward(loss)
        update.step()
        clock.tick()
    clock.write(loss.item(), model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
