"""A language model by `ExactTrainer`: python trainer_tokens.py WAY. Its samples have different numbers of labels."""

import hashlib
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from samebits.integrations.transformers import ExactTrainer

WAY = sys.argv[1]


class Tokens(Dataset):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.arange(8) * (i + 3) % 20
        return {"input_ids": ids, "labels": torch.where(torch.arange(8) <= i % 6, (ids + 1) % 20, -100)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.num_calls = nn.Embedding(20, 8), nn.Linear(8, 20), 0

    def forward(self, input_ids: Tensor, labels: Tensor, **more: Tensor) -> dict[str, Tensor]:
        self.num_calls += 1
        logits = self.head(nn.functional.dropout(self.embed(input_ids), 0.2, self.training))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        scale = self.num_calls if WAY == "a counter of the model" else 1
        return {"loss": loss * scale / more.get("num_items_in_batch", (labels != -100).sum())}


class Trainer(ExactTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore
        if WAY == "the mean of a micro-batch":
            num_items_in_batch = None
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if WAY == "inputs that are taken apart":
            inputs.clear()
        if WAY == "a counter":
            self.num_calls = getattr(self, "num_calls", 0) + 1
            return loss * min(1.0, self.num_calls / 40)
        if WAY == "a value that is kept":
            self.kept = 0.9 * getattr(self, "kept", 0.0) + loss.detach()
            return loss / self.kept
        return loss * min(1.0, (self.state.global_step + 1) / 4) if WAY == "the step" else loss


torch.manual_seed(0)
model = Model()
arguments = TrainingArguments(
    "output", per_device_train_batch_size=2, num_train_epochs=3, learning_rate=0.05, use_cpu=True, report_to="none",
    disable_tqdm=True, save_strategy="no",
)  # fmt: skip
Trainer(model=model, args=arguments, global_batch=10, train_dataset=Tokens()).train()
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values()))
print("sha256", digest.hexdigest())
