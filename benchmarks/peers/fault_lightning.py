"""The same job in Lightning, started by torchrun, with its checkpoints, resumed by ckpt_path="last"."""

from __future__ import annotations

import lightning
from fault_task import BATCH_A_PROCESS, EPOCHS, digits, finish, folder, network, note, optimizer, pictures
from lightning_job import Job, make_trainer
from torch.utils.data import DataLoader


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    job = Job(network(), optimizer, pictures)
    trainer = make_trainer(2, EPOCHS, folder(), note)
    trainer.fit(job, DataLoader(digits(), batch_size=BATCH_A_PROCESS, shuffle=True), ckpt_path="last")
    finish(job.net)


if __name__ == "__main__":
    main()
