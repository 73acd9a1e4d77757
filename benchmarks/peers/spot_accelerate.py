"""The same job with Accelerate, started by torchrun, with save_state every ten steps and load_state to resume."""

from __future__ import annotations

import itertools
import shutil

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from spot_task import STEPS_AN_EPOCH, batch_of_process, folder, images, network, note, optimizer, read
from torch.utils.data import DataLoader


def main() -> None:
    """Train until killed."""
    set_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = network()
    loader = DataLoader(images(), batch_of_process(accelerator.num_processes), shuffle=True, drop_last=True)
    model, update, loader = accelerator.prepare(model, optimizer(model), loader)
    saved = sorted(folder().glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    step = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.split("_")[1])
    for epoch in itertools.count(step // STEPS_AN_EPOCH):
        loader.set_epoch(epoch)
        for pictures, labels in loader:
            update.zero_grad()
            accelerator.backward(F.cross_entropy(model(read(pictures)), labels))
            update.step()
            step += 1
            note(step)
        _save(accelerator, step)


def _save(accelerator: Accelerator, step: int) -> None:
    """Save a checkpoint and rename it when complete, since a process may be killed while it writes."""
    part = folder() / "part"
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        part.replace(folder() / f"step_{step}")
        shutil.rmtree(folder() / f"step_{step - STEPS_AN_EPOCH}", ignore_errors=True)


if __name__ == "__main__":
    main()
