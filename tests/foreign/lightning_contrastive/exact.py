"""Learn embeddings of scikit-learn's digits without labels: SimCLR's loss over two random views of each image."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samebits
from samebits.integrations.lightning import ExactStrategy


class TwoViews(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def view(self, image):
        rows, columns = torch.randint(-1, 2, (2,)).tolist()
        return torch.roll(image, (rows, columns), (1, 2)) + 0.1 * torch.randn(image.shape)

    def __getitem__(self, index):
        return self.view(self.images[index]), self.view(self.images[index])


class LitSimCLR(L.LightningModule):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 32),
        )  # fmt: skip
        self.projector = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return self.encoder(x)

    def loss(self, batch):
        views = torch.cat(batch)
        z = F.normalize(self.projector(self(views)), dim=1)
        similarity = z @ z.T / self.temperature
        similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        half = len(z) // 2
        return F.cross_entropy(similarity, torch.arange(len(z)).roll(half))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    L.seed_everything(5, workers=True)
    images = torch.tensor(load_digits().images[:330], dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TwoViews(images), batch_size=15, shuffle=True)

    model = LitSimCLR()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=ExactStrategy(global_batch=60),
        max_epochs=args.epochs,
        callbacks=[
            ModelCheckpoint(args.out, every_n_train_steps=4, save_last=True),
            EarlyStopping("train_loss", patience=2),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        print("steps", trainer.global_step)
        print("sha256", samebits.weights_sha256(model.state_dict()))


if __name__ == "__main__":
    main()
