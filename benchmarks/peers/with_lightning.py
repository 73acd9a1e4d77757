"""The task in PyTorch Lightning, with every optional feature that costs time off."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from task import BATCH_A_PROCESS, Clock, Net, optimizer, pictures, start, steps
from torch import Tensor
from torch.utils.data import DataLoader


class Job(lightning.LightningModule):
    """Network, loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        return F.nll_loss(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The tutorials' optimizer."""
        return optimizer(self)


class Ticker(lightning.Callback):
    """Records the end of every step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.last: Tensor | float = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The optimizer has stepped."""
        self.clock.tick()
        self.last = outputs["loss"]


def main() -> None:
    start()
    job = Job()
    ticker = Ticker(Clock(int(os.environ.get("LOCAL_RANK", "0")), steps()))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["BENCH_PROCS"]), strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[ticker],
    )  # fmt: skip
    workers = int(os.environ["BENCH_WORKERS"])
    trainer.fit(job, DataLoader(pictures(), batch_size=BATCH_A_PROCESS, shuffle=True, num_workers=workers))
    ticker.clock.write(float(ticker.last), job)


if __name__ == "__main__":
    main()
