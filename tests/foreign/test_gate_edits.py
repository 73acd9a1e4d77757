"""`samebits gate` over forty edits of scripts: twenty that change nothing of the training, and twenty that do.

    python -m tests.foreign.test_gate_edits             # all of them, and the counts
    python -m tests.foreign.test_gate_edits launch      # of one form of script

A loop with samebits.exact, one for torchrun that runs as two ranks of `samebits launch`, Lightning and Accelerate have
the same network and data. Forty edits of a recipe are in tests/unit/replay/edits.py.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replay import edits

NUM_STEPS = 4

NET = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.pictures = torch.randn(count, 1, 6, 6, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = self.pictures[index]
        brightness = torch.rand(())
        picture = picture + 0.1 * brightness
        picture = picture * 1.5
        return picture, self.labels[index]


"""
NET += edits.NET + "\n"
EXACT = f"""import samebits
{NET}
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Pictures(96), batch_size=8, shuffle=True)
model, optimizer, loader = samebits.exact(model, optimizer, loader, global_batch=16)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""
LAUNCH = f"""import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler
{NET}
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * dist.get_world_size(), momentum=0.9)
pictures = Pictures(96)
sampler = DistributedSampler(pictures)
loader = DataLoader(pictures, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""
LIGHTNING = f"""import lightning as L
from samebits.integrations.lightning import ExactStrategy
{NET}

class Training(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


L.seed_everything(1)
model = Training()
loader = DataLoader(Pictures(96), batch_size=8, shuffle=True)
trainer = L.Trainer(
    accelerator="cpu", devices=1, strategy=ExactStrategy(global_batch=16), max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(model, loader)
"""
ACCELERATE = f"""from accelerate.utils import set_seed
from samebits.integrations.accelerate import ExactAccelerator
{NET}
accelerator = ExactAccelerator(global_batch=16, seed=0, cpu=True)
set_seed(42)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(Pictures(96), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
"""
FORMS = {"exact": EXACT, "launch": LAUNCH, "lightning": LIGHTNING, "accelerate": ACCELERATE}
FLAGS = {"launch": ["--as", "2"]}


@dataclass(frozen=True)
class Edit:
    """An edit of a script: what is replaced by what, and where the training differs first; nowhere if empty."""

    form: str
    name: str
    old: str
    new: str
    phase: str = ""
    module: str = ""
    is_full: bool = False  #: Whether it is judged with every change of this package.

    def apply(self) -> str:
        """Return the edited script."""
        assert self.old in FORMS[self.form], self.name
        return FORMS[self.form].replace(self.old, self.new)


LOOP = """        for block in self.blocks:
            x = x + F.relu(block(x))
"""
UNROLLED = """        x = x + F.relu(self.blocks[0](x))
        x = x + F.relu(self.blocks[1](x))
"""
LOSS = "loss = F.cross_entropy({}(x), y)"
IN_LOOP = "        loss.backward()\n"
AUGMENTED = """        picture = picture + 0.1 * brightness
        picture = picture * 1.5
"""
SWAPPED = """        picture = picture * 1.5
        picture = picture + 0.1 * brightness
"""

EDITS = [
    Edit("exact", "a module is renamed", "self.head", "self.classifier"),
    Edit("exact", "a loop is unrolled", LOOP, UNROLLED, is_full=True),
    Edit("exact", "the loss is computed in two lines", "        loss = F.cross_entropy(model(x), y)\n",
         "        outputs = model(x)\n        loss = F.cross_entropy(input=outputs, target=y)\n"),
    Edit("exact", "the loss is logged", IN_LOOP, IN_LOOP + "        print(loss.item())\n"),
    Edit("exact", "a module is compiled", "model = Net()", "model = torch.compile(Net())"),
    Edit("launch", "a module is renamed", "self.norm", "self.bn", is_full=True),
    Edit("launch", "imports are reordered", "import os\nimport torch.distributed as dist\n",
         "import torch.distributed as dist\nimport os\n"),
    Edit("launch", "a loop is unrolled", LOOP, UNROLLED),
    Edit("launch", "the loss is logged by an all_reduce", IN_LOOP,
         IN_LOOP + "        shown = loss.detach().clone()\n        dist.all_reduce(shown)\n        print(shown)\n"),
    Edit("launch", "types are added", "def forward(self, x):", "def forward(self, x: torch.Tensor) -> torch.Tensor:"),
    Edit("launch", "gradients are set to zero after the step", "optimizer.step()",
         "optimizer.step()\n        optimizer.zero_grad()"),
    Edit("lightning", "the module is renamed", "self.net", "self.network"),
    Edit("lightning", "the loss is logged", "        return loss\n",
         "        self.log('loss', loss)\n        return loss\n"),
    Edit("lightning", "a module is wrapped", "nn.Dropout(0.2)", "nn.Sequential(nn.Dropout(0.2))"),
    Edit("lightning", "a callback is added", "logger=False,", "logger=False, callbacks=[L.pytorch.callbacks.Timer()],"),
    Edit("lightning", "defaults are written out", "momentum=0.9)", "momentum=0.9, dampening=0, nesterov=False)"),
    Edit("accelerate", "a module is renamed", "self.stem", "self.first"),
    Edit("accelerate", "a function is called as a method", "F.relu(block(x))", "block(x).relu()"),
    Edit("accelerate", "the loss is gathered and printed", "            optimizer.step()\n",
         "            print(accelerator.gather(loss.detach()).mean())\n            optimizer.step()\n"),
    Edit("accelerate", "the loss as a module", "F.cross_entropy(", "nn.CrossEntropyLoss()("),

    Edit("exact", "eps of batch norm", "nn.BatchNorm2d(width)", "nn.BatchNorm2d(width, eps=1.1e-5)", "forward", "norm"),
    Edit("exact", "an epsilon of the learning rate", "lr=0.05", "lr=0.05000001", "learning rate", "(optimizer)",
         is_full=True),
    Edit("exact", "augmentations are swapped", AUGMENTED, SWAPPED, "sample values", "(data)", is_full=True),
    Edit("exact", "reduction of the loss", "model(x), y)", "model(x), y, reduction='sum') / 8.001", "loss", "loss"),
    Edit("exact", "the order of layers", "self.head(self.dropout(x.flatten(1)))",
         "self.dropout(self.head(x.flatten(1)))", "forward", "head", is_full=True),
    Edit("launch", "eps of batch norm", "nn.BatchNorm2d(width)", "nn.BatchNorm2d(width, eps=1.1e-5)", "forward", "norm",
         is_full=True),
    Edit("launch", "the learning rate without the number of ranks", "0.05 * dist.get_world_size()", "0.05",
         "learning rate", "(optimizer)"),
    Edit("launch", "a sampler without set_epoch and shuffle", "DistributedSampler(pictures)",
         "DistributedSampler(pictures, shuffle=False)", "sample values", "(data)"),
    Edit("launch", "momentum of batch norm", "nn.BatchNorm2d(width)", "nn.BatchNorm2d(width, momentum=0.11)", "buffers",
         "(the model)"),
    Edit("launch", "an initialization", "        self.dropout =",
         "        nn.init.zeros_(self.stem.bias)\n        self.dropout =", "initial weights", "stem"),
    Edit("launch", "clipping of the gradient", IN_LOOP,
         IN_LOOP + "        nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n", "backward", "head"),
    Edit("lightning", "rate of dropout", "nn.Dropout(0.2)", "nn.Dropout(0.25)", "forward", "net.dropout"),
    Edit("lightning", "momentum of the optimizer", "momentum=0.9", "momentum=0.91", "update", "(optimizer)"),
    Edit("lightning", "smoothing of labels", "self.net(x), y)", "self.net(x), y, label_smoothing=1e-4)", "loss",
         "loss"),
    Edit("lightning", "a gradient is cut", "x = x + F.relu(block(x))", "x = x.detach() + F.relu(block(x))", "backward",
         "net.blocks.0"),
    Edit("lightning", "another seed", "seed_everything(1)", "seed_everything(2)", "initial weights", "net.stem"),
    Edit("accelerate", "weight decay of another optimizer", "AdamW(", "Adam(", "update", "(optimizer)"),
    Edit("accelerate", "a changed default of a library call", "F.avg_pool2d(x, 2)",
         "F.avg_pool2d(x, 2, divisor_override=3)", "forward", "the model"),
    Edit("accelerate", "another activation", "F.relu(block(x))", "F.gelu(block(x))", "forward", "the model"),
    Edit("accelerate", "fewer samples", "Pictures(96)", "Pictures(95)", "sample", "(data)"),
]  # fmt: skip


def gate(script: Path, file: Path, *flags: str) -> dict[str, Any]:
    """Return what `samebits gate --json` reports."""
    command = [sys.executable, "-P", "-m", "samebits", "gate", str(script), "--file", str(file), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["is_same"] == (done.returncode == 0)
    return found


def judge(edit: Edit, folder: Path) -> tuple[bool, bool, str]:
    """Return whether an edit is judged right, whether its place is named, and the report. Scripts are in `folder`."""
    file = folder / f"{edit.form}.gate.json"
    if not file.exists():
        script = folder / f"{edit.form}_script.py"  # not lightning.py, which would hide the package
        script.write_text(FORMS[edit.form])
        gate(script, file, "--steps", str(NUM_STEPS), *FLAGS.get(edit.form, []))
    script = folder / "edited.py"
    script.write_text(edit.apply())
    found = gate(script, file)
    difference = found["difference"] or {"phase": "", "module": ""}
    is_named = difference["phase"].startswith(edit.phase) and difference["module"].startswith(edit.module)
    return found["is_same"] == (not edit.phase), is_named, str(found["difference"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate")


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(
            edit,
            id=f"{edit.form}: {edit.name}",
            # Each starts a framework; all of them take five minutes.
            marks=pytest.mark.full if edit.is_full else pytest.mark.lab,
        )
        for edit in EDITS
    ],
)
@pytest.mark.one_in(3)
def test_an_edit_is_judged_right_and_its_place_is_named(edit: Edit, folder: Path) -> None:
    is_right, is_named, report = judge(edit, folder)
    assert is_right, report
    assert is_named, report


def main() -> int:
    """Judge the edits of all forms, or of those named, and print the counts."""
    chosen = [edit for edit in EDITS if edit.form in (sys.argv[1:] or FORMS)]
    right = named = 0
    with tempfile.TemporaryDirectory() as place:
        for edit in chosen:
            is_right, is_named, report = judge(edit, Path(place))
            right += is_right
            named += is_named and bool(edit.phase)
            print(f"{'ok' if is_right and is_named else 'WRONG':<6}{edit.form:<11}{edit.name:<48}{report}", flush=True)
    harmful = sum(bool(edit.phase) for edit in chosen)
    print(f"{right} of {len(chosen)} judged right; the first place named in {named} of {harmful}")
    return 0 if right == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
