"""The same job in Lightning, started by torchrun, with its checkpoints, resumed by ckpt_path="last"."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from spot_task import batch_of_process, folder, images, network, note, optimizer, read
from torch import Tensor
from torch.utils.data import DataLoader


class Job(lightning.LightningModule):
    """Network, loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        pictures, labels = batch
        return F.cross_entropy(self.net(read(pictures)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return optimizer(self)


class Notes(lightning.Callback):
    """Records the end of every step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The optimizer has stepped."""
        note(trainer.global_step)


def main() -> None:
    """Train until killed."""
    lightning.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    num_procs = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=num_procs, strategy="ddp", max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(dirpath=folder(), save_last=True), Notes()],
    )  # fmt: skip
    loader = DataLoader(images(), batch_of_process(num_procs), shuffle=True, drop_last=True)
    trainer.fit(Job(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
