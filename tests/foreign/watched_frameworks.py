"""A small training in a framework's exact loop in which something happens on rank 1.

torchrun --nproc-per-node 2 tests/foreign/watched_frameworks.py lightning sleep
"""

import os
import sys
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

framework, what = sys.argv[1:]
happens = os.environ["RANK"] == "1"
options = {"global_batch": 16, "hang_timeout_s": 4.0 if what == "sleep" else None}


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": torch.arange(4.0) + index / 32}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        loss = self.linear(x).mean()
        if happens and what == "sleep" and self.num_calls == 3:
            time.sleep(1000)
        if happens and what == "nan" and self.num_calls == 3:
            loss = loss * float("nan")
        if happens and what == "drift" and self.num_calls == 2:
            with torch.no_grad():
                self.linear.bias += 1e-3
        return {"loss": loss}


torch.manual_seed(0)
loader = DataLoader(Rows(), batch_size=8, shuffle=True)
if framework == "lightning":
    import lightning as L

    from samebits.integrations.lightning import ExactStrategy

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, batch_idx):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=ExactStrategy(**options), max_epochs=2, **quiet)
    trainer.fit(Module(), loader)
elif framework == "accelerate":
    from samebits.integrations.accelerate import ExactAccelerator

    accelerator = ExactAccelerator(cpu=True, **options)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
else:
    from transformers import TrainingArguments

    from samebits.integrations.transformers import ExactTrainer

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), num_train_epochs=2, per_device_train_batch_size=8, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=100, max_grad_norm=0.0,
    )  # fmt: skip
    ExactTrainer(model=Model(), args=arguments, train_dataset=Rows(), **options).train()
