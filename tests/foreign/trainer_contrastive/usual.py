"""Train an encoder of digits by a contrastive loss, with a Trainer that computes its own loss."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import samebits


class TwoViews(Dataset):
    """Two random views of each digit."""

    def __init__(self, num_samples):
        images = load_digits().images[:num_samples]
        self.images = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16

    def __len__(self):
        return len(self.images)

    def view(self, image):
        shift = torch.randint(-1, 2, (2,)).tolist()
        return image.roll(shift, (1, 2)) * (0.8 + 0.4 * torch.rand(())) + 0.05 * torch.randn(image.shape)

    def __getitem__(self, index):
        image = self.images[index]
        return {"first": self.view(image), "second": self.view(image)}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.project = nn.Linear(32 * 16, 32)

    def forward(self, first, second):
        both = F.normalize(self.project(self.features(torch.cat([first, second]))), dim=1)
        return both.chunk(2)


class ContrastiveTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        first, second = model(**inputs)
        logits = first @ second.T / 0.2
        labels = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return (loss, (first, second)) if return_outputs else loss


class PrintStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step % 10 == 0:
            print(f"step {state.global_step}, epoch {state.epoch:.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    set_seed(3)
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        max_grad_norm=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        remove_unused_columns=False,
        logging_steps=5,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = ContrastiveTrainer(
        model=Encoder(),
        args=training_args,
        train_dataset=TwoViews(500),
        callbacks=[PrintStep()],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        print("sha256", samebits.weights_sha256(trainer.model.state_dict()))


if __name__ == "__main__":
    main()
