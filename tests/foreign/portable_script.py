"""Train a CNN with Adam in portable arithmetic: in a loop of its own, or with a framework. Prints the SHA-256.

python -m tests.foreign.portable_script loop|lightning|accelerate|trainer
"""

import hashlib
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import samebits


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.1), nn.MaxPool2d(2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 5))
    nn.init.kaiming_normal_(layers[0].weight)
    return model


def data() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 1, 8, 8, generator=generator), torch.randint(0, 5, (40,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)


def train_in_a_loop() -> nn.Module:
    model = network()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer, loader = samebits.exact(model, optimizer, data(), global_batch=12, per_step=[ema])
    scheduler = loader.per_step(CosineAnnealingLR(optimizer, 2 * len(loader)))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ema.update_parameters(model)
            scheduler.step()
    return nn.ModuleList([model, ema])


def train_with_lightning() -> nn.Module:
    import lightning

    from samebits.integrations.lightning import ExactStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.01)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = lightning.Trainer(
        strategy=ExactStrategy(global_batch=12), accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_epochs=2, gradient_clip_val=1.0, **quiet,
    )  # fmt: skip
    trainer.fit(module, data())
    return module


def train_with_accelerate() -> nn.Module:
    from samebits.integrations.accelerate import ExactAccelerator

    accelerator, model = ExactAccelerator(global_batch=12, cpu=True), network()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.01), data())
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def train_with_the_trainer() -> nn.Module:
    from transformers import TrainingArguments

    from samebits.integrations.transformers import ExactTrainer

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.network(x), labels)}

    model = Model()
    arguments = TrainingArguments(
        "unused", per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no",
        lr_scheduler_type="cosine", learning_rate=0.01, disable_tqdm=True, logging_strategy="no", optim="adamw_torch",
    )  # fmt: skip
    samples = [{"x": x, "labels": y} for x, y in data().dataset]
    ExactTrainer(model=model, args=arguments, train_dataset=samples, global_batch=12).train()
    return model


WAYS = {
    "loop": train_in_a_loop, "lightning": train_with_lightning, "accelerate": train_with_accelerate,
    "trainer": train_with_the_trainer,
}  # fmt: skip

if __name__ == "__main__":
    samebits.use_kernels("portable")
    trained = WAYS[sys.argv[1]]()
    digest = hashlib.sha256()
    for value in trained.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    if os.environ.get("RANK", "0") == "0":
        print("sha256", digest.hexdigest())
