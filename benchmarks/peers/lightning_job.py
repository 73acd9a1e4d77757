"""What the Lightning jobs of the benchmarks have in common: the module, the notes of its steps, and the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn


class Job(lightning.LightningModule):
    """Network, loss and optimizer.

    Args:
        net: The network.
        make_optimizer: Makes the optimizer of this module.
        read: Returns a batch's images for training, from the images and the number of the step.
    """

    def __init__(
        self,
        net: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        read: Callable[[Tensor, int], Tensor],
    ) -> None:
        super().__init__()
        self.net, self._make_optimizer, self._read = net, make_optimizer, read

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        return F.cross_entropy(self.net(self._read(images, self.global_step)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self._make_optimizer(self)


class Notes(lightning.Callback):
    """Records the end of every step."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self._note = note

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The optimizer has stepped."""
        self._note(trainer.global_step)


def make_trainer(num_procs: int, max_epochs: int, folder: Path, note: Callable[[int], None]) -> lightning.Trainer:
    """Make a Trainer with DDP on CPUs that keeps its last checkpoint in a folder."""
    return lightning.Trainer(
        accelerator="cpu", devices=num_procs, strategy="ddp", max_epochs=max_epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True), Notes(note)],
    )  # fmt: skip
