"""Train a CNN with batch norm and dropout on digits, in a loop with Accelerate."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import samebits


def get_datasets():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:760], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(labels[:760]))
    return random_split(data, [600, 160], generator=torch.Generator().manual_seed(0))


def get_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 16, 10),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--checkpointing_steps", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("."))
    parser.add_argument("--resume_from_checkpoint", type=Path)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(42)
    train_data, eval_data = get_datasets()
    train_loader = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
    eval_loader = DataLoader(eval_data, batch_size=32)
    model = get_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    num_batches = args.num_epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=num_batches)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    completed_steps, starting_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        completed_steps = int(args.resume_from_checkpoint.name.removeprefix("step_"))
        starting_epoch, resume_step = divmod(completed_steps, len(train_loader))

    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        active_loader = train_loader
        if epoch == starting_epoch and resume_step:
            active_loader = accelerator.skip_first_batches(train_loader, resume_step)
        for images, labels in active_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if accelerator.sync_gradients:
                completed_steps += 1
                if args.checkpointing_steps and completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(args.output_dir / f"step_{completed_steps}")

        model.eval()
        correct, total = 0, 0
        for images, labels in eval_loader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == labels).sum().item()
            total += len(labels)
        accelerator.print(f"epoch {epoch}: {correct} of {total} are correct")

    if accelerator.is_main_process:
        print("sha256", samebits.weights_sha256(accelerator.unwrap_model(model).state_dict()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
