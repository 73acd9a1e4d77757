"""The same job in Lightning, started by torchrun, with its checkpoints, resumed by ckpt_path="last"."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from fault_task import BATCH_A_PROCESS, EPOCHS, digits, finish, folder, network, note, optimizer, pictures
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader


class Job(lightning.LightningModule):
    """Network, loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        return F.cross_entropy(self.net(pictures(images, self.global_step)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return optimizer(self)


class Notes(lightning.Callback):
    """Records the end of every step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The optimizer has stepped."""
        note(trainer.global_step)


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    job = Job()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=EPOCHS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(dirpath=folder(), save_last=True), Notes()],
    )  # fmt: skip
    trainer.fit(job, DataLoader(digits(), batch_size=BATCH_A_PROCESS, shuffle=True), ckpt_path="last")
    finish(job.net)


if __name__ == "__main__":
    main()
