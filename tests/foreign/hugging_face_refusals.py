"""Tries what can't be exact with Accelerate and the Trainer, and prints the error of each."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import samebits

DATA = TensorDataset(torch.randn(40, 3))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **{"batch_size": 4, "shuffle": True, **options})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from DATA


def accelerator(**options: Any) -> Any:
    from samebits.integrations.accelerate import ExactAccelerator

    return ExactAccelerator(**{"cpu": True, "global_batch": 8, **options})


def prepared(**options: Any) -> tuple[Any, ...]:
    acc, model = accelerator(**options), nn.Linear(3, 1)
    return acc, *acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())


def saved_within_a_step(folder: Path) -> None:
    acc, model, _, data = prepared()
    for (inputs,) in data:
        acc.backward(model(inputs).sum())
        acc.save_state(folder / "early")


def loaded_without_position(folder: Path) -> None:
    (folder / "usual").mkdir()
    prepared()[0].load_state(folder / "usual")


def loaded_from_another_batch(folder: Path) -> None:
    prepared(global_batch=16)[0].load_state(checkpoint(folder))


def skipped_other_steps(folder: Path) -> None:
    acc, *_, data = prepared()
    acc.load_state(checkpoint(folder))
    acc.skip_first_batches(data, 2)


def checkpoint(folder: Path) -> Path:
    """Save the state after one step."""
    acc, model, optimizer, data = prepared()
    for (inputs,) in data:
        acc.backward(model(inputs).sum())
        optimizer.step()
        if acc.sync_gradients:
            acc.save_state(folder / "step_1")
            break
    return folder / "step_1"


def backward_on_another_loader(folder: Path) -> None:
    acc, model, _, _ = prepared()
    for (inputs,) in acc.prepare(loader(shuffle=False)):
        acc.backward(model(inputs).sum())


def trainer(**options: Any) -> None:
    from transformers import TrainingArguments

    from samebits.integrations.transformers import ExactTrainer

    data = options.pop("train_dataset", DATA)
    args = TrainingArguments(
        output_dir="out", report_to="none", use_cpu=True, disable_tqdm=True, max_steps=1, remove_unused_columns=False,
        **options,
    )  # fmt: skip
    ExactTrainer(model=nn.Linear(3, 1), args=args, train_dataset=data, global_batch=8).train()


ACCELERATE: dict[str, Callable[[Path], Any]] = {
    "accumulation": lambda _: accelerator(gradient_accumulation_steps=2),
    "no global batch": lambda _: prepared(global_batch=0),
    "two shuffled loaders": lambda _: accelerator().prepare(loader(), loader()),
    "sampler": lambda _: accelerator().prepare(loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 40, 40))),
    "stream": lambda _: accelerator().prepare(DataLoader(Stream(), batch_size=4)),
    "lbfgs": lambda _: accelerator().prepare(torch.optim.LBFGS(nn.Linear(3, 1).parameters())),
    "sync batch norm": lambda _: accelerator().prepare(nn.Sequential(nn.SyncBatchNorm(3))),
    "save within a step": saved_within_a_step,
    "load without position": loaded_without_position,
    "load another batch": loaded_from_another_batch,
    "skip other steps": skipped_other_steps,
    "backward on another loader": backward_on_another_loader,
}
TRAINER: dict[str, Callable[[Path], Any]] = {
    "accumulation": lambda _: trainer(gradient_accumulation_steps=2),
    "auto batch size": lambda _: trainer(auto_find_batch_size=True),
    "data seed": lambda _: trainer(data_seed=7),
    "tokens": lambda _: trainer(average_tokens_across_devices=False),
    "data skip": lambda _: trainer(ignore_data_skip=True),
    "groups of lengths": lambda _: trainer(train_sampling_strategy="group_by_length"),
    "stream": lambda _: trainer(train_dataset=Stream()),
}


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    for name, attempt in {"accelerate": ACCELERATE, "trainer": TRAINER}[kind].items():
        try:
            attempt(folder)
            print(f"{name}| nothing is refused", flush=True)
        except samebits.SamebitsError as error:
            print(f"{name}| {error.line}", flush=True)


if __name__ == "__main__":
    main()
    # Some attempts are refused in the body of a loop, which is then left inside a step: an error at the script's end.
    os._exit(0)
