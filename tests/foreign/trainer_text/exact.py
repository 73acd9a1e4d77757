"""Train a tiny BERT to classify synthetic sentences of different lengths with the Trainer."""

import argparse

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

import samebits
from samebits.integrations.transformers import ExactTrainer

VOCABULARY, CLS, PAD = 64, 1, 0


class Sentences(Dataset):
    """Tokens whose class is decided by which of two words is more frequent."""

    def __init__(self, num_samples, seed):
        self.num_samples, self.seed = num_samples, seed

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        random = np.random.default_rng([self.seed, index])
        tokens = random.integers(4, VOCABULARY, random.integers(6, 24))
        label = index % 2
        tokens[random.random(len(tokens)) < 0.3] = 2 + label
        return {"input_ids": [CLS, *tokens.tolist()], "label": label}


def collate(samples):
    length = max(len(sample["input_ids"]) for sample in samples)
    input_ids = torch.full((len(samples), length), PAD)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    set_seed(42)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=2,
    )
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=2e-3,
        warmup_steps=4,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = ExactTrainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        global_batch=64,
        data_collator=collate,
        train_dataset=Sentences(500, seed=0),
        eval_dataset=Sentences(90, seed=1),
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        print("sha256", samebits.weights_sha256(trainer.model.state_dict()))


if __name__ == "__main__":
    main()
