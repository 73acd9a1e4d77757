"""A recipe with one fault, chosen by `fault`."""

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from samebits import Batch, DatasetSamples, Parts
from samebits.config.schema import RunConfig
from samebits.metrics.classification import Accuracy

PRESET = {"global_batch": 8, "micro_batch": 4, "epochs": 1, "device": "cpu", "report": {"tensorboard": False}}


class Config(RunConfig):
    fault: str = Field(default="none", description="which")


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.last = nn.LazyLinear(3) if fault == "lazy" else nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.bool))
        if fault == "complex":
            self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64), persistent=True)
        if fault == "one float64":
            self.last.bias = nn.Parameter(self.last.bias.double())
        if fault == "meta":
            self.last = nn.Linear(6, 3, device="meta")

    def forward(self, inputs):
        if self.fault == "replaced buffer":
            self.count = self.count + 1
        if self.fault == "changed bool":
            self.seen.fill_(True)
        outputs = self.last(inputs.byte() if self.fault == "bytes" else inputs)
        return outputs.detach() if self.fault == "detached" else outputs


class Extra(Net):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


class Samples:
    def __init__(self, fault, num):
        self.fault, self.num = fault, num

    def __len__(self):
        return {"negative length": -1, "text length": "9"}.get(self.fault, self.num)

    def batch(self, indices, keys):
        if self.fault == "tuple batch":
            return torch.zeros(len(indices), 6), torch.zeros(len(indices))
        if self.fault == "short batch":
            indices = indices[:-1]
        labels = torch.from_numpy(indices) % 3
        return Batch(F.one_hot(labels, 6).float(), labels, torch.from_numpy(indices))


class Triples:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return np.zeros(6, dtype=np.float32), index % 3, index


def loss(fault):
    def of(outputs, batch):
        if fault == "integer loss":
            return {"wrong": (outputs.argmax(1) != batch.targets).sum()}
        if fault == "no gradient":
            with torch.no_grad():
                return {"cross_entropy": F.cross_entropy(outputs, batch.targets)}
        if fault == "loss by sample":
            return {"cross_entropy": F.cross_entropy(outputs, batch.targets, reduction="none")}
        return {"cross_entropy": F.cross_entropy(outputs, batch.targets)}

    return of


class Rows:
    """A metric without a fault, to derive from."""

    def __init__(self):
        self.num_samples = 0

    def add(self, outputs, batch):
        self.num_samples += len(batch)

    def state(self):
        return {"num_samples": self.num_samples}

    def merge(self, state):
        self.num_samples += state["num_samples"]

    def result(self):
        return {"top1": float(self.num_samples)}


class Uncounted(Rows):
    def __init__(self):
        pass

    def merge(self, state):
        pass


class Method(Rows):
    def __init__(self):
        self.count = 0

    def num_samples(self):
        return self.count


class Misspelt(Rows):
    def add(self, outputs, batch):
        self.num_samples += len(batch.labels)


class Twice(Rows):
    def merge(self, state):
        self.num_samples += 2 * state["num_samples"]


class Unsendable(Rows):
    def state(self):
        return {"num_samples": object()}


class OtherName(Rows):
    def result(self):
        return {"accuracy": 0.5}


class Demanding(Rows):
    def result(self):
        if self.num_samples < 8:
            raise ValueError("a correlation needs 8 samples")
        return {"top1": 0.5}


METRICS = {
    "uncounted": Uncounted, "method": Method, "misspelt": Misspelt, "twice": Twice, "unsendable": Unsendable,
    "other name": OtherName, "demanding": Demanding,
}  # fmt: skip


def infer(model, inputs):
    return model(inputs).numpi()


def build(config):
    fault = config.fault
    model = {
        "float64": lambda: Net(fault).double(),
        "frozen": lambda: Net(fault).requires_grad_(False),
        "no parameters": nn.Flatten,
        "a function": lambda: torch.relu,
        "extra state": lambda: Extra(fault),
    }.get(fault, lambda: Net(fault))()
    return Parts(
        model=model,
        loss=loss(fault),
        train_data=lambda: DatasetSamples(Triples()) if fault == "triples" else Samples(fault, 20),
        eval_data=lambda: Samples(fault, 0 if fault == "no evaluation" else 10),
        metric=Accuracy(3) if fault == "made metric" else METRICS.get(fault, lambda: Accuracy(3)),
        monitor=(("top1", "max"),) if fault == "monitor" else ("top1", "max"),
        infer=infer if fault == "infer" else None,
    )
