"""Train a GAN on digits with Accelerate: two models, two optimizers, noise drawn in the loop."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits
from samebits.integrations.accelerate import ExactAccelerator

NOISE = 16


def get_generator():
    return nn.Sequential(
        nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.Tanh(),
    )  # fmt: skip


def get_discriminator():
    return nn.Sequential(
        nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--checkpointing_steps", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("."))
    parser.add_argument("--resume_from_checkpoint", type=Path)
    args = parser.parse_args()

    accelerator = ExactAccelerator(cpu=True, global_batch=64, seed=0)
    set_seed(5)
    generator, discriminator = get_generator(), get_discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    images = torch.tensor(load_digits().images[:600], dtype=torch.float32).flatten(1) / 8 - 1
    loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True)
    generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(
        generator, discriminator, optimizer_g, optimizer_d, loader
    )

    completed_steps = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        completed_steps = int(args.resume_from_checkpoint.name.removeprefix("step_"))
    starting_epoch, resume_step = divmod(completed_steps, len(loader))

    for epoch in range(starting_epoch, args.num_epochs):
        skip = resume_step if epoch == starting_epoch else 0
        for (real,) in accelerator.skip_first_batches(loader, skip) if skip else loader:
            # (1) Discriminator: real images are 1, generated ones 0.
            optimizer_d.zero_grad()
            logits = discriminator(real)
            accelerator.backward(F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)))
            fake = generator(torch.randn(len(real), NOISE, device=accelerator.device))
            logits = discriminator(fake.detach())
            accelerator.backward(F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits)))
            optimizer_d.step()
            # (2) Generator: the discriminator takes its images for real ones.
            optimizer_g.zero_grad()
            logits = discriminator(fake)
            accelerator.backward(F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)))
            optimizer_g.step()
            if accelerator.sync_gradients:
                completed_steps += 1
                if args.checkpointing_steps and completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(args.output_dir / f"step_{completed_steps}")
        accelerator.print(f"epoch {epoch} is done")

    if accelerator.is_main_process:
        both = nn.ModuleList([accelerator.unwrap_model(generator), accelerator.unwrap_model(discriminator)])
        print("sha256", samebits.weights_sha256(both.state_dict()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
