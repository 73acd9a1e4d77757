"""The same job with Accelerate, started by torchrun, with save_state per epoch and load_state to resume."""

from __future__ import annotations

import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from fault_task import BATCH_A_PROCESS, EPOCHS, digits, finish, folder, network, note, optimizer, pictures
from torch.utils.data import DataLoader


def main() -> None:
    set_seed(0)
    places = ProjectConfiguration(project_dir=str(folder()), automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=places)
    model = network()
    loader = DataLoader(digits(), batch_size=BATCH_A_PROCESS, shuffle=True)
    model, update, loader = accelerator.prepare(model, optimizer(model), loader)
    saved = sorted((folder() / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
    first = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        first = int(saved[-1].name.split("_")[1]) + 1
        places.iteration = first
    step = first * len(loader)
    for _ in range(first, EPOCHS):
        for images, labels in loader:
            update.zero_grad()
            accelerator.backward(F.cross_entropy(model(pictures(images, step)), labels))
            update.step()
            step += 1
            note(step)
        accelerator.save_state()
    finish(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
