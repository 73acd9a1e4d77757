"""A GAN of one process, as in PyTorch's examples: two networks, two optimizers, pictures by a counter."""

import torch
from samples_and_digest import data, print_sha256
from torch import nn
from torch.utils.data import DataLoader

generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(8, 4)
optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
dataloader = DataLoader(data(32), batch_size=16, shuffle=True, num_workers=0)

for _ in range(2):
    for i, (real, _labels) in enumerate(dataloader, 0):
        critic.zero_grad()
        error_real = criterion(critic(real), torch.ones(len(real), 1))
        error_real.backward()
        fake = generator(torch.randn(len(real), 4))
        error_fake = criterion(critic(fake.detach()), torch.zeros(len(real), 1))
        error_fake.backward()
        optimizer_d.step()

        generator.zero_grad()
        error_g = criterion(critic(fake), torch.ones(len(real), 1))
        error_g.backward()
        optimizer_g.step()
        if i % 100 == 0:
            generator(fixed_noise)
print_sha256(generator, critic)
