"""Train a DCGAN on scikit-learn's digits: two networks, two optimizers, three backward passes.

torchrun --nproc-per-node 2 tests/foreign/ddp_gan/usual.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samebits

nz, ngf, ndf = 16, 16, 16


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 2, 2, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
        nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 2, 1, 2, bias=False), nn.Flatten(),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    opt = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    images = torch.tensor(load_digits().images / 8 - 1, dtype=torch.float32)[:480, None]
    dataset = TensorDataset(images)
    sampler = DistributedSampler(dataset)
    dataloader = DataLoader(dataset, batch_size=16, sampler=sampler)

    netG, netD = generator().apply(weights_init), discriminator().apply(weights_init)
    optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    start_epoch = 0
    if os.path.exists(opt.checkpoint):
        state = torch.load(opt.checkpoint)
        for name, part in (("G", netG), ("D", netD), ("optG", optimizerG), ("optD", optimizerD)):
            part.load_state_dict(state[name])
        start_epoch = state["epoch"]
    criterion = nn.BCEWithLogitsLoss()
    modelG, modelD = DDP(netG), DDP(netD, broadcast_buffers=False)

    for epoch in range(start_epoch, opt.epochs):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(dataloader):
            # Update D: maximize log(D(x)) + log(1 - D(G(z)))
            netD.zero_grad()
            label = torch.ones(len(real), 1)
            errD_real = criterion(modelD(real), label)
            errD_real.backward()
            fake = modelG(torch.randn(len(real), nz, 1, 1))
            errD_fake = criterion(modelD(fake.detach()), label.fill_(0.0))
            errD_fake.backward()
            optimizerD.step()

            # Update G: maximize log(D(G(z)))
            netG.zero_grad()
            errG = criterion(modelD(fake), label.fill_(1.0))
            errG.backward()
            optimizerG.step()
            if rank == 0 and i % 5 == 0:
                print(f"[{epoch}][{i}] Loss_D {errD_real + errD_fake:.4f} Loss_G {errG:.4f}")
        if rank == 0:
            state = {"G": netG.state_dict(), "D": netD.state_dict(), "epoch": epoch + 1}
            torch.save({**state, "optG": optimizerG.state_dict(), "optD": optimizerD.state_dict()}, opt.checkpoint)

    if rank == 0:
        weights = {
            f"{name}.{key}": value
            for name, net in (("G", netG), ("D", netD))
            for key, value in net.state_dict().items()
        }
        print("sha256", samebits.weights_sha256(weights))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
