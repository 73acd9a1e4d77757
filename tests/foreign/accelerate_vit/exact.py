"""Train a vision transformer on digits with Accelerate: bfloat16, gradient accumulation, warm-up by step."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samebits
from samebits.integrations.accelerate import ExactAccelerator


class Digits(Dataset):
    def __init__(self, num_samples):
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[:num_samples], dtype=torch.float32).view(-1, 8, 8) / 16
        self.labels = labels[:num_samples]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        shift = torch.randint(-1, 2, (2,)).tolist()  # a random shift by up to one pixel
        return {"pixels": self.images[index].roll(shift, (0, 1)), "label": int(self.labels[index])}


class VisionTransformer(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.patch = nn.Linear(4, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, pixels):
        patches = pixels.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(pixels), 16, 4)
        tokens = torch.cat([self.cls.expand(len(pixels), -1, -1), self.patch(patches)], dim=1)
        return self.head(self.encoder(tokens + self.position)[:, 0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--checkpointing_steps", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("."))
    parser.add_argument("--resume_from_checkpoint", type=Path)
    args = parser.parse_args()

    accelerator = ExactAccelerator(cpu=True, mixed_precision="bf16", global_batch=64, seed=0)
    set_seed(1)
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    loader = DataLoader(Digits(500), batch_size=16, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    completed_steps, starting_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        completed_steps = int(args.resume_from_checkpoint.name.removeprefix("step_"))
        starting_epoch, resume_step = divmod(completed_steps * accelerator.gradient_accumulation_steps, len(loader))

    model.train()
    for epoch in range(starting_epoch, args.num_epochs):
        active_loader = loader
        if epoch == starting_epoch and resume_step:
            active_loader = accelerator.skip_first_batches(loader, resume_step)
        for batch in active_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["pixels"]), batch["label"], label_smoothing=0.1)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if args.checkpointing_steps and completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(args.output_dir / f"step_{completed_steps}")
        accelerator.print(f"epoch {epoch}: learning rate {scheduler.get_last_lr()[0]:.5f}")

    if accelerator.is_main_process:
        print("sha256", samebits.weights_sha256(accelerator.unwrap_model(model).state_dict()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
