"""Common parts of the jobs of benchmarks/faults.py: a small network on UCI digits, and injected faults.

FAULT_KIND names the fault that a rank causes itself: nan, model, lr. FAULT_FOLDER is where steps are recorded, by rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import sklearn.datasets
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH_A_PROCESS = 32
EPOCHS = 6
NAN_STEP = 40
PAUSE_S = 0.04


def kind() -> str:
    """Return the fault of this rank; rank 0 has none."""
    return os.environ.get("FAULT_KIND", "") if os.environ.get("RANK") == "1" else ""


def folder() -> Path:
    """Return the folder of the job's files."""
    return Path(os.environ["FAULT_FOLDER"])


def digits() -> TensorDataset:
    """Return 1,437 training images, (N, 1, 8, 8), and their labels."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    pictures = torch.tensor(images[:1437], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(pictures, torch.tensor(labels[:1437]))


def network() -> nn.Module:
    """Make a network with batch norm and dropout; a wider one on the faulty rank."""
    width = 24 if kind() == "model" else 16
    return nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(36 * width, 10),
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make SGD; with another learning rate on the faulty rank."""
    return torch.optim.SGD(model.parameters(), lr=0.1 if kind() == "lr" else 0.05, momentum=0.9)


def pictures(images: Tensor, step: int) -> Tensor:
    """Return a training batch; NaN in one step of the faulty rank."""
    time.sleep(PAUSE_S)
    return images * float("nan") if kind() == "nan" and step == NAN_STEP else images


def note(step: int) -> None:
    """Record the end of a step."""
    place = folder().parent / f"steps-{os.environ.get('RANK', '0')}"
    with place.open("a") as file:
        file.write(f"{step} {time.time()} {os.getpid()}\n")


def finish(model: nn.Module) -> None:
    """Write hashes of every rank's final weights: with batch norm's statistics, and of the parameters alone."""
    tensors = model.state_dict()
    parameters = {name: tensors[name] for name, _ in model.named_parameters()}
    finite = all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors.values())
    place = folder().parent / f"final-{os.environ.get('RANK', '0')}.json"
    place.write_text(json.dumps({"sha256": _hash(tensors), "parameters": _hash(parameters), "finite": finite}))


def _hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
