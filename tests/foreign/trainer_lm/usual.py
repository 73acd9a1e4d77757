"""Train a tiny GPT-2, or adapters of it, on synthetic sequences with the Trainer. The loss is a mean over tokens."""

import argparse

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import samebits

VOCABULARY = 32


class Sequences(Dataset):
    """Arithmetic sequences modulo the vocabulary."""

    def __init__(self, num_samples, seed):
        self.num_samples, self.seed = num_samples, seed

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        random = np.random.default_rng([self.seed, index])
        start, difference, length = random.integers([0, 1, 4], [VOCABULARY, 6, 24])
        return torch.tensor((start + difference * np.arange(length)) % VOCABULARY)


def collate(samples):
    input_ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": input_ids, "attention_mask": (labels != -100).long(), "labels": labels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="output")
    parser.add_argument("--save_steps", type=int, default=0)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--lora", action="store_true", help="train adapters (peft) only")
    args = parser.parse_args()

    set_seed(8)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
        model = get_peft_model(model, adapters)
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=collate,
        train_dataset=Sequences(300, seed=0),
        eval_dataset=Sequences(50, seed=1),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        print("sha256", samebits.weights_sha256(trainer.model.state_dict()))


if __name__ == "__main__":
    main()
