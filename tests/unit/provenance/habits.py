"""Small recipes with habits that make a result depend on how a run went."""

import itertools
import os
import random
import secrets
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy

NUM_SAMPLES = 11


class Net(nn.Module):
    """A linear layer whose outputs a habit may scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.num_calls = 0
        self.torch_rng = torch.Generator().manual_seed(1)
        self.numpy_rng = np.random.default_rng(1)
        self.python_rng = random.Random(1)  # no secret
        self.last = torch.zeros(2)

    def scale(self) -> float | Tensor:
        return 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs * self.scale())
        return outputs


class Counts(Net):
    def scale(self) -> float:
        self.num_calls += 1
        return 1 + 0.1 * self.num_calls


class OwnTorch(Net):
    def scale(self) -> Tensor:
        return torch.rand((), generator=self.torch_rng)


class OwnNumpy(Net):
    def scale(self) -> float:
        return self.numpy_rng.random()


class OwnPython(Net):
    def scale(self) -> float:
        return self.python_rng.random()


class Clock(Net):
    def scale(self) -> float:
        return time.perf_counter_ns() % 1_000_003 / 1e6


class Secret(Net):
    def scale(self) -> float:
        return secrets.randbelow(1 << 30) / (1 << 30)


class Remembers(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs) + self.last
        self.last = outputs.detach().mean(0)
        return outputs


class Writes(Net):
    def scale(self) -> float:
        with torch.no_grad():
            self.layer.weight.mul_(0.99)
        return 1.0


class WritesNoGradient(Net):
    """A parameter's `.data`, which autograd does not see."""

    def scale(self) -> float:
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return 1.0


class GlobalNumpy(Net):
    def scale(self) -> float:
        return np.random.rand()


class GlobalPython(Net):
    def scale(self) -> float:
        return random.random()


class Pid(Net):
    def scale(self) -> float:
        return 1 + os.getpid() % 1000 / 1000


class RunningMean:
    """A loss that is divided by the mean of those before."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        found = nn.functional.cross_entropy(outputs, batch.targets)
        self.mean = 0.9 * self.mean + 0.1 * float(found.detach())
        return {"loss": found / self.mean}


def plain_loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(outputs, batch.targets)}


class Data:
    """Samples of their own `batch`, to which a habit may add a number."""

    def __init__(self) -> None:
        self.inputs = torch.arange(3.0 * NUM_SAMPLES).view(NUM_SAMPLES, 3) / 30
        self.num_calls = itertools.count()
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def more(self) -> float | Tensor:
        return 0.0

    def batch(self, indices: Any, keys: Any) -> Batch:
        places = torch.from_numpy(indices)
        return Batch(self.inputs[places] + self.more(), places % 2, places)


class CountingData(Data):
    def more(self) -> float:
        return 0.1 * next(self.num_calls)


class ChangingData(Data):
    def batch(self, indices: Any, keys: Any) -> Batch:
        self.inputs[torch.from_numpy(indices)] *= 0.9
        return super().batch(indices, keys)


class OwnRngData(Data):
    def more(self) -> float:
        return self.rng.random()


class ClockData(Data):
    def more(self) -> float:
        return time.perf_counter_ns() % 1_000_003 / 1e6


class NumpyData(Data):
    def more(self) -> float:
        return np.random.rand()


class PythonData(Data):
    def more(self) -> float:
        return random.random()


class TorchData(Data):
    def more(self) -> Tensor:
        return torch.rand(())


class CountingItems:
    """A map-style dataset that counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.num_calls += 1
        return torch.full((3,), float(index + self.num_calls)), index % 2


def parts(model: type[Net] = Net, data: Any = Data, eval_data: Any = Data, loss: Any = plain_loss) -> Parts:
    torch.manual_seed(0)
    samples, held_out = data(), eval_data()
    return Parts(model=model(), loss=loss, train_data=lambda: samples, eval_data=lambda: held_out,
                 metric=lambda: Accuracy(2))  # fmt: skip
