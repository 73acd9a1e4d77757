"""Forty edits of a recipe: twenty that change nothing of its training, and twenty that do."""

from dataclasses import dataclass

RECIPE = '''"""A recipe."""

import time

import torch
import torch.nn.functional as F
from torch import nn

from samebits.config.schema import RunConfig
from samebits.data.keyed import uniform
from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy

PRESET = {"global_batch": 24, "micro_batch": 8, "epochs": 2, "eval_batch": 12, "optim": {"lr": 0.05, "momentum": 0.9}}


class Pictures:
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.pictures = torch.randn(count, 1, 6, 6, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, keys):
        places = torch.from_numpy(indices)
        brightness = torch.from_numpy(uniform(keys, 0)).float().view(-1, 1, 1, 1)
        return Batch(self.pictures[places] + 0.1 * brightness, self.labels[places], places)


'''
NET = """class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(9 * width, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = x + F.relu(block(x))
        x = F.avg_pool2d(x, 2)
        return self.head(self.dropout(x.flatten(1)))
"""
RECIPE += (
    NET
    + """

def loss(outputs, batch):
    return {"cross_entropy": F.cross_entropy(outputs, batch.targets), "size": 1e-3 * outputs.square().mean()}


def build(config):
    model = Net(6)
    return Parts(
        model=model,
        loss=loss,
        train_data=lambda: Pictures(101, 1),
        eval_data=lambda: Pictures(37, 2),
        metric=lambda: Accuracy(3),
        describe={"data": "made up"},
    )
"""
)


@dataclass(frozen=True)
class Edit:
    """An edit: its name, what is replaced by what, and where the training differs first; nowhere if empty."""

    name: str
    old: str
    new: str
    phase: str = ""
    module: str = ""

    def apply(self) -> str:
        """Return the edited recipe."""
        assert self.old in RECIPE, self.name
        return RECIPE.replace(self.old, self.new)


_LOOP = """        for block in self.blocks:
            x = x + F.relu(block(x))
"""
_UNROLLED = """        x = x + F.relu(self.blocks[0](x))
        x = x + F.relu(self.blocks[1](x))
"""
_LOGGING = """        if self.training:
            print("mean", x.detach().mean().item())
        x = F.avg_pool2d(x, 2)
"""

HARMLESS = [
    Edit("a variable is renamed", "width", "channels"),
    Edit("a module is renamed", "self.head", "self.classifier"),
    Edit("a list of modules is renamed", "self.blocks", "self.layers"),
    Edit("a class is renamed", "Net", "Network"),
    Edit("a local variable is renamed", "brightness", "light"),
    Edit("imports are reordered", "import time\n\nimport torch\n", "import torch\nimport time\n"),
    Edit("an import is removed", "import time\n\n", ""),
    Edit("a comment is added", "        x = F.avg_pool2d", "        # Half the size.\n        x = F.avg_pool2d"),
    Edit("a docstring is changed", '"""A recipe."""', '"""A recipe of a network."""'),
    Edit("a loop is unrolled", _LOOP, _UNROLLED),
    Edit("a line is logged", "        x = F.avg_pool2d(x, 2)\n", _LOGGING),
    Edit("the loss is logged", 'return {"cross_entropy"', 'print(outputs.sum().item())\n    return {"cross_entropy"'),
    Edit("time is measured", "    model = Net(6)", "    model = Net(6)\n    print(time.time())"),
    Edit("a module is wrapped", "nn.Dropout(0.2)", "nn.Sequential(nn.Dropout(0.2))"),
    Edit("a module without effect is added", "nn.Dropout(0.2)", "nn.Sequential(nn.Identity(), nn.Dropout(0.2))"),
    Edit("a function is called as a method", "F.relu(block(x))", "block(x).relu()"),
    Edit("another name of the same operation", "x.flatten(1)", "x.reshape(len(x), -1)"),
    Edit("defaults are written out", "nn.Dropout(0.2)", "nn.Dropout(p=0.2, inplace=False)"),
    Edit("types are added", "def forward(self, x):", "def forward(self, x: torch.Tensor) -> torch.Tensor:"),
    Edit("what the recipe says of its data", "made up", "synthetic"),
]
HARMFUL = [
    Edit("eps of batch norm", "nn.BatchNorm2d(width)", "nn.BatchNorm2d(width, eps=1.1e-5)", "forward", "norm"),
    Edit("momentum of batch norm", "nn.BatchNorm2d(width)", "nn.BatchNorm2d(width, momentum=0.11)", "buffers", "(the"),
    Edit("rate of dropout", "nn.Dropout(0.2)", "nn.Dropout(0.25)", "forward", "dropout"),
    Edit("another activation", "F.relu(self.norm", "F.gelu(self.norm", "forward", "the model"),
    Edit("a layer is left out", "self.norm(self.stem(x))", "self.stem(x)", "forward", "the model"),
    Edit("another default of a convolution", "1, width, 3, padding=1", "1, width, 3, 1, 1, padding_mode='circular'",
         "forward", "stem"),
    Edit("another pooling", "F.avg_pool2d", "F.max_pool2d", "forward", "the model"),
    Edit("a changed default of a library call", "F.avg_pool2d(x, 2)", "F.avg_pool2d(x, 2, divisor_override=3)",
         "forward", "the model"),
    Edit("an initialization", "        self.dropout", "        nn.init.zeros_(self.stem.bias)\n        self.dropout",
         "initial weights", "stem"),
    Edit("modules made in another order", "        self.norm = nn.BatchNorm2d(width)\n", "        torch.rand(1)\n"
         "        self.norm = nn.BatchNorm2d(width)\n", "initial weights", "blocks.0"),
    Edit("a stronger augmentation", "0.1 * brightness", "0.2 * brightness", "sample values", "(data)"),
    Edit("a swapped augmentation", "+ 0.1 * brightness", "* (1 + 0.1 * brightness)", "sample values", "(data)"),
    Edit("another seed of the data", "Pictures(101, 1)", "Pictures(101, 3)", "sample values", "(data)"),
    Edit("one sample less", "Pictures(101, 1)", "Pictures(100, 1)", "sample values", "(data)"),
    Edit("a weight of the loss", "1e-3", "2e-3", "loss", "loss"),
    Edit("smoothing of labels", "batch.targets)", "batch.targets, label_smoothing=1e-4)", "loss", "loss"),
    Edit("a gradient is cut", "x = x + F.relu(block(x))", "x = x.detach() + F.relu(block(x))", "backward", "blocks.0"),
    Edit("an epsilon of the learning rate", '"lr": 0.05', '"lr": 0.05000001', "learning rate", "(optimizer)"),
    Edit("momentum of the optimizer", '"momentum": 0.9', '"momentum": 0.91', "update", "(optimizer)"),
    Edit("dropout on in evaluation", "self.dropout(x.flatten(1))", "F.dropout(x.flatten(1), 0.2, True)", "evaluation"),
]  # fmt: skip
