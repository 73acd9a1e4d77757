"""Train a detector of rectangles with Accelerate: each image has zero to four boxes."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samebits
from samebits.integrations.accelerate import ExactAccelerator

SIZE, STRIDE = 32, 4


class Rectangles(Dataset):
    """Images (1, 32, 32) with rectangles, and their boxes (N, 4) as x1, y1, x2, y2."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        count = int(torch.randint(0, 5, (), generator=generator))
        corners = torch.randint(0, SIZE - 12, (count, 2), generator=generator)
        sizes = torch.randint(4, 12, (count, 2), generator=generator)
        boxes = torch.cat([corners, corners + sizes], dim=1)
        image = 0.2 * torch.randn(1, SIZE, SIZE, generator=generator)
        for x1, y1, x2, y2 in boxes.tolist():
            image[:, y1:y2, x1:x2] += 1.0
        return image, {"boxes": boxes.float()}


def collate(samples):
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


class Detector(nn.Module):
    """A score and four distances for each cell of a grid."""

    def __init__(self):
        super().__init__()
        layers = []
        for channels_in, channels_out, stride in ((1, 16, 2), (16, 32, 2), (32, 32, 1)):
            layers += [nn.Conv2d(channels_in, channels_out, 3, stride, 1), nn.BatchNorm2d(channels_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Dropout2d(0.1), nn.Conv2d(32, 5, 1))

    def forward(self, images):
        return self.layers(images)


def loss_fn(outputs, targets):
    scores, distances = outputs[:, 0], outputs[:, 1:]
    wanted = torch.zeros_like(scores)
    box_losses = []
    for index, target in enumerate(targets):
        for box in target["boxes"]:
            x, y = ((box[:2] + box[2:]) / 2 / STRIDE).long().tolist()
            wanted[index, y, x] = 1.0
            center = torch.tensor([x + 0.5, y + 0.5]) * STRIDE
            distance = torch.cat([center - box[:2], box[2:] - center]) / STRIDE
            box_losses.append(F.smooth_l1_loss(distances[index, :, y, x], distance, reduction="sum"))
    loss = F.binary_cross_entropy_with_logits(scores, wanted)
    return loss + sum(box_losses) / len(targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--checkpointing_steps", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("."))
    parser.add_argument("--resume_from_checkpoint", type=Path)
    args = parser.parse_args()

    accelerator = ExactAccelerator(cpu=True, global_batch=32, seed=0)
    set_seed(3)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_loader = DataLoader(Rectangles(240), batch_size=8, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(Rectangles(50), batch_size=8, collate_fn=collate)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    accelerator.register_for_checkpointing(scheduler)

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
        for images, targets in active_loader:
            loss = loss_fn(model(images), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.sync_gradients:
                completed_steps += 1
                if args.checkpointing_steps and completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(args.output_dir / f"step_{completed_steps}")
        scheduler.step()

        model.eval()
        counts = []
        for images, targets in eval_loader:
            with torch.no_grad():
                found = (model(images)[:, 0] > 0).flatten(1).sum(1)
            pairs = torch.stack([found, torch.tensor([len(target["boxes"]) for target in targets])], dim=1)
            counts.append(accelerator.gather_for_metrics(pairs))
        found, true = torch.cat(counts).sum(0).tolist()
        accelerator.print(f"epoch {epoch}: {found} boxes are found, {true} are there")

    if accelerator.is_main_process:
        print("sha256", samebits.weights_sha256(accelerator.unwrap_model(model).state_dict()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
