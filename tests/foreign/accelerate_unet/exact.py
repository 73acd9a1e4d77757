"""Train a U-Net on synthetic masks of circles with Accelerate: random flips in a worker, an EMA of the weights."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import samebits
from samebits.integrations.accelerate import ExactAccelerator


class Circles(Dataset):
    """Noisy images with a circle, and the mask of the circle."""

    def __init__(self, num_samples=200, size=24):
        self.num_samples, self.size = num_samples, size

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x, y, radius = (
            torch.rand(3, generator=generator) * torch.tensor([10, 10, 4]) + torch.tensor([7, 7, 3])
        ).tolist()
        rows, columns = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        mask = ((rows - y) ** 2 + (columns - x) ** 2 < radius**2).float()[None]
        image = mask + 0.5 * torch.randn(mask.shape, generator=generator)
        if torch.rand(()) < 0.5:
            image, mask = image.flip(-1), mask.flip(-1)
        return image + 0.1 * torch.randn(image.shape), mask


def block(channels_in, channels_out):
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = block(1, 8), block(8, 16), block(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join2, self.join1 = block(32, 16), block(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, images):
        one = self.down1(images)
        two = self.down2(F.max_pool2d(one, 2))
        bottom = self.bottom(F.max_pool2d(two, 2))
        two = self.join2(torch.cat([two, self.up2(bottom)], dim=1))
        return self.head(self.join1(torch.cat([one, self.up1(two)], dim=1)))


def loss_fn(logits, masks):
    overlap = (logits.sigmoid() * masks).sum((1, 2, 3))
    dice = 1 - 2 * overlap / (logits.sigmoid().sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(logits, masks) + dice.mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--checkpointing_steps", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("."))
    parser.add_argument("--resume_from_checkpoint", type=Path)
    args = parser.parse_args()

    accelerator = ExactAccelerator(cpu=True, global_batch=32, seed=0)
    set_seed(7)
    model = UNet()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    loader = DataLoader(Circles(), batch_size=8, shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(ema)

    completed_steps = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        completed_steps = int(args.resume_from_checkpoint.name.removeprefix("step_"))
    starting_epoch, resume_step = divmod(completed_steps, len(loader))

    model.train()
    for epoch in range(starting_epoch, args.num_epochs):
        skip = resume_step if epoch == starting_epoch else 0
        for images, masks in accelerator.skip_first_batches(loader, skip) if skip else loader:
            loss = loss_fn(model(images), masks)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.update_parameters(accelerator.unwrap_model(model))
                completed_steps += 1
                if args.checkpointing_steps and completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(args.output_dir / f"step_{completed_steps}")
        accelerator.print(f"epoch {epoch} is done")

    if accelerator.is_main_process:
        print("sha256", samebits.weights_sha256(ema.state_dict()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
