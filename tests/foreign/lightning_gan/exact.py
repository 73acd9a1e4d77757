"""Train a small GAN on scikit-learn's digits: two optimizers by manual optimization."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits
from samebits.integrations.lightning import ExactStrategy


class LitGAN(L.LightningModule):
    def __init__(self, latent=16):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(
            nn.Linear(latent, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        noise = torch.randn(len(real), self.latent, device=self.device)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(opt_d)
        fake = self.generator(noise).detach()
        d_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        d_loss = (d_loss + F.binary_cross_entropy_with_logits(self.discriminator(fake), zeros)) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.98) for each in (opt_g, opt_d)]
        return [opt_g, opt_d], schedulers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    L.seed_everything(4, workers=True)
    images = torch.tensor(load_digits().data[:480], dtype=torch.float32) / 8 - 1
    loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True)

    model = LitGAN()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=ExactStrategy(global_batch=64),
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(args.out, every_n_train_steps=6, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        print("steps", trainer.global_step)
        print("sha256", samebits.weights_sha256(model.state_dict()))


if __name__ == "__main__":
    main()
