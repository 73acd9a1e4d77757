"""Train a small U-Net to segment synthetic shapes, with a LightningDataModule and DataLoader workers."""

import argparse

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samebits


class Shapes(Dataset):
    """A disc or a square on noise, and its mask; flipped at random in training."""

    def __init__(self, num_images, first=0, is_augmented=False):
        self.num_images, self.first, self.is_augmented = num_images, first, is_augmented

    def __len__(self):
        return self.num_images

    def __getitem__(self, index):
        rng = np.random.default_rng(self.first + index)
        row, column, radius = rng.integers(6, 18), rng.integers(6, 18), rng.integers(3, 6)
        rows, columns = np.mgrid[:24, :24]
        if index % 2:
            mask = (rows - row) ** 2 + (columns - column) ** 2 <= radius**2
        else:
            mask = np.maximum(abs(rows - row), abs(columns - column)) <= radius
        image = torch.tensor(mask + rng.normal(0, 0.5, mask.shape), dtype=torch.float32).unsqueeze(0)
        mask = torch.tensor(mask, dtype=torch.float32).unsqueeze(0)
        if self.is_augmented and torch.rand(()) < 0.5:
            image, mask = image.flip(-1), mask.flip(-1)
        return image, mask


class ShapesData(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Shapes(120, is_augmented=True), batch_size=6, shuffle=True, num_workers=1)

    def val_dataloader(self):
        return DataLoader(Shapes(20, first=1000), batch_size=6)

    def test_dataloader(self):
        return DataLoader(Shapes(21, first=2000), batch_size=6)


def block(num_in, num_out):
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU())


class LitUNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = block(1, 8), block(8, 16), block(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join2, self.join1 = block(32, 16), block(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.middle(F.max_pool2d(two, 2))
        x = self.join2(torch.cat([self.up2(x), two], dim=1))
        return self.out(self.join1(torch.cat([self.up1(x), one], dim=1)))

    def loss(self, batch):
        image, mask = batch
        logits = self(image)
        score = logits.sigmoid()
        dice = (2 * (score * mask).sum() + 1) / (score.sum() + mask.sum() + 1)
        return F.binary_cross_entropy_with_logits(logits, mask) + 1 - dice, dice

    def training_step(self, batch, batch_idx):
        loss, _ = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, dice = self.loss(batch)
        self.log_dict({"val_loss": loss, "val_dice": dice}, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_dice", self.loss(batch)[1], sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    L.seed_everything(3, workers=True)
    model, data = LitUNet(), ShapesData()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(args.out, every_n_train_steps=2, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data, ckpt_path="last")
    test = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print("steps", trainer.global_step)
        print("test_dice", test[0]["test_dice"])
        print("sha256", samebits.weights_sha256(model.state_dict()))


if __name__ == "__main__":
    main()
