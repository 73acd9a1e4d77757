"""Train a tiny ViT on digits with the Trainer: random augmentation, gradient accumulation, label smoothing."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import samebits


class Digits(Dataset):
    def __init__(self, num_samples):
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[:num_samples], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = labels[:num_samples].tolist()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        noise = 0.1 * torch.randn(1, 8, 8)
        return {"pixel_values": self.images[index] + noise, "labels": self.labels[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    set_seed(1)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=25,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        label_smoothing_factor=0.1,
        lr_scheduler_type="linear",
        dataloader_num_workers=1,
        logging_steps=10,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=training_args,
        train_dataset=Digits(500),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        print("sha256", samebits.weights_sha256(trainer.model.state_dict()))


if __name__ == "__main__":
    main()
