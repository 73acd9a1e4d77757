"""Train a small CNN with batch norm and dropout on scikit-learn's digits, with Lightning's DDP."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import samebits


class LitDigits(L.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 10))
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, x):
        return self.classifier(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    L.seed_everything(1, workers=True)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[500:650], y[500:650]), batch_size=16)

    model = LitDigits()
    checkpoint = ModelCheckpoint(args.out, every_n_train_steps=3, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[checkpoint, LearningRateMonitor("step")],
        logger=CSVLogger(args.out),
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    trainer.fit(model, train_loader, val_loader, ckpt_path="last")
    if trainer.is_global_zero:
        print("steps", trainer.global_step)
        print(
            "val_acc",
            trainer.callback_metrics["val_acc"].item(),
            "val_loss",
            trainer.callback_metrics["val_loss"].item(),
        )
        print("sha256", samebits.weights_sha256(model.state_dict()))


if __name__ == "__main__":
    main()
