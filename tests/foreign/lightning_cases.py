"""Trains a small LightningModule in many ways, and prints what came out as JSON. Run by `test_lightning.py`.

Worlds of two processes are forked, so that Lightning is imported once. They come first: a process that has run a
backward pass cannot be forked.
"""

import json
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchmetrics import MeanMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import samebits
from samebits.integrations.lightning import ExactStrategy

OUT = Path(sys.argv[1])
NUM_SAMPLES, GLOBAL_BATCH, EPOCHS = 44, 16, 3
RESUMED = (2, 3, 7)  # in an epoch, at the end of one, in the last one


class Noisy(Dataset):
    """Samples with random noise, drawn anew whenever one is read."""

    def __init__(self, num_samples=NUM_SAMPLES):
        generator = torch.Generator().manual_seed(num_samples)
        self.x = torch.randn(num_samples, 6, generator=generator)
        self.y = torch.randint(3, (num_samples,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(6), self.y[index]


class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.train_acc, self.val_acc = (MulticlassAccuracy(num_classes=3, average="micro") for _ in range(2))
        self.val_error, self.val_mean = MeanSquaredError(), MeanMetric()
        self.seen, self.num_zeroed = [], 0

    def on_before_zero_grad(self, optimizer):
        self.num_zeroed += 1

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("num", float(len(x)), reduce_fx="sum")
        self.log("train_acc", self.train_acc, on_epoch=True, on_step=False)
        return loss

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x + 0.01 * torch.randn_like(x), y) if self.training else batch

    def on_train_batch_end(self, outputs, batch, batch_idx):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        loss = self.trainer.callback_metrics["loss_step"].item() if "loss_step" in self.trainer.callback_metrics else 0
        self.seen.append((batch_idx, self.global_step, rate, loss))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        logits = self.model(x)
        self.val_acc(logits, y)
        self.val_error(logits[:, 0], y.float())
        self.val_mean(logits.mean(), len(x))
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", self.val_acc)
        self.log("val_error", self.val_error)
        self.log("val_mean", self.val_mean)
        self.log("num_val", float(len(x)), reduce_fx="sum")

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SaveEach(Callback):
    """Saves a checkpoint after each step."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def loader(num_samples=NUM_SAMPLES, **options):
    return DataLoader(Noisy(num_samples), **{"batch_size": 4, **options})


def trainer_of(procs=1, **options):
    strategy = options.pop("strategy", None) or ExactStrategy(
        global_batch=GLOBAL_BATCH, start_method="fork" if procs > 1 else "popen"
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, "max_epochs": EPOCHS, **quiet, **options}
    return L.Trainer(accelerator="cpu", devices=procs, strategy=strategy, default_root_dir=OUT, **options)


def summary(trainer, model):
    metrics = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
    return {"steps": trainer.global_step, "metrics": metrics, "hash": samebits.weights_sha256(model.state_dict())}


def fit(procs=1, ckpt_path=None, val=(13,), **options):
    model, trainer = Small(), trainer_of(procs, **options)
    trainer.fit(model, loader(shuffle=True), [loader(size) for size in val], ckpt_path=ckpt_path)
    return {**summary(trainer, model), "seen": model.seen, "num_zeroed": model.num_zeroed}


def refusal(make):
    try:
        make()
    except samebits.SamebitsError as error:
        return type(error).__name__, str(error)
    return "none", ""


def refused(**options):
    data = options.pop("data", None) or loader(shuffle=True)
    module = options.pop("module", Small)
    return refusal(lambda: trainer_of(**options).fit(module(), data))


class Closing(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.step()


class Synced(Small):
    def __init__(self):
        super().__init__()
        self.model[1] = nn.SyncBatchNorm(8)


class Skipping(Small):
    def training_step(self, batch, batch_idx):
        return None


class SkippingSome(Small):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if (batch[1] == 0).sum() > 1 else loss


class Distilling(Small):
    """Its teacher is no part of it, and in training mode."""

    def __init__(self):
        super().__init__()
        self.kept = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.0 * self.kept[0](batch[0].flatten(1)[:, :4]).mean()


class Mixing(Small):
    """Reads another DataLoader from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.others = iter(loader(shuffle=True))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 0:
            return loss
        return loss + self.model(next(self.others)[0]).square().mean()


def refusals():
    weighted = loader(sampler=WeightedRandomSampler(torch.ones(NUM_SAMPLES), NUM_SAMPLES))
    pairs = {"one": loader(), "two": loader()}
    return {
        "accumulation": refused(accumulate_grad_batches=2),
        "averaging": refused(callbacks=[StochasticWeightAveraging(1e-2)]),
        "sync_batchnorm": refused(sync_batchnorm=True),
        "sync layer": refused(module=Synced),
        "precision": refused(precision="bf16-true"),
        "sampler": refused(data=weighted),
        "loaders": refused(data=pairs),
        "closure": refused(module=Closing),
        "no loss": refused(module=Skipping),
        "teacher": refused(module=Distilling),
        "second loader": refused(module=Mixing),
        "no loss in some": refused(module=SkippingSome),
        "one sample": refused(data=loader(33, shuffle=True)),
        "option": refusal(lambda: ExactStrategy(global_batch=4, find_unused_parameters=True)),
    }


def resume_with_other_seed(path):
    strategy = ExactStrategy(global_batch=GLOBAL_BATCH, seed=1)
    trainer_of(strategy=strategy).fit(Small(), loader(shuffle=True), ckpt_path=path)


def stopped():
    """Stop after the second validation, by a metric that all ranks must see alike."""
    return EarlyStopping("val_loss", patience=0, min_delta=10.0, check_on_train_epoch_end=False)


def half():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3))


def tested():
    trainer, model = trainer_of(), Small()
    return trainer.test(model, loader(13), verbose=False)[0]


def main():
    warnings.simplefilter("ignore")
    saved = OUT / "saved"
    found = {}
    found["two"] = fit(2, callbacks=[SaveEach(saved)], val=(13, 3))
    found["two limited"] = fit(2, limit_train_batches=2, limit_val_batches=2, callbacks=[stopped()])
    found["two fp16"] = fit(2, plugins=[half()])
    found["one"] = fit(val=(13, 3))
    found["one limited"] = fit(limit_train_batches=2, limit_val_batches=2, callbacks=[stopped()])
    found["resumed"] = {step: fit(ckpt_path=saved / f"{step}.ckpt", val=(13, 3)) for step in RESUMED}
    found["other seed"] = refusal(lambda: resume_with_other_seed(saved / "2.ckpt"))
    found["max_steps"] = fit(max_steps=4, max_epochs=-1)
    found["val_check"] = fit(val_check_interval=1, max_epochs=1)
    found["clipped"] = fit(gradient_clip_val=0.1)
    found["bf16"] = fit(precision="bf16-mixed")
    found["one fp16"] = fit(plugins=[half()])
    found["tested"] = tested()
    found["refused"] = refusals()
    (OUT / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
