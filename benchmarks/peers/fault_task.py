"""What the jobs of benchmarks/faults.py have in common: a small network on UCI digits, and faults made on purpose.

FAULT_KIND names the fault that a rank makes by itself: nan, model, lr. FAULT_FOLDER is where steps are noted, by rank.
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
    """The fault that this rank makes; none on rank 0."""
    return os.environ.get("FAULT_KIND", "") if os.environ.get("RANK") == "1" else ""


def folder() -> Path:
    """Where the job keeps all it writes."""
    return Path(os.environ["FAULT_FOLDER"])


def digits() -> TensorDataset:
    """1,437 training pictures, (N, 1, 8, 8), and their labels."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    pictures = torch.tensor(images[:1437], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(pictures, torch.tensor(labels[:1437]))


def network() -> nn.Module:
    """A net with batch norm and dropout; another one on the rank whose fault it is."""
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
    """SGD; with another learning rate on the rank whose fault it is."""
    return torch.optim.SGD(model.parameters(), lr=0.1 if kind() == "lr" else 0.05, momentum=0.9)


def pictures(images: Tensor, step: int) -> Tensor:
    """A batch as it is trained on; not a number in one step of the rank whose fault it is."""
    time.sleep(PAUSE_S)
    return images * float("nan") if kind() == "nan" and step == NAN_STEP else images


def note(step: int) -> None:
    """A step is done."""
    place = folder().parent / f"steps-{os.environ.get('RANK', '0')}"
    with place.open("a") as file:
        file.write(f"{step} {time.time()} {os.getpid()}\n")


def finish(model: nn.Module) -> None:
    """Leave hashes of the final weights, of every rank: with batch norm's statistics, and of the parameters alone."""
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
