"""Fifty planted differences, each with the step and the part of the step that `samebits diff` has to find.

The step is the first one that computes another value. An update differs in the step that makes it, although a record
shows it in the next step's loss. Where the second run does not repeat its own record (a fault of a machine, another
version of a library), only the step can be known, unless a checkpoint follows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.engine import step as step_module
from samebits.engine.job import Job
from samebits.engine.progress import StepResult
from samebits.engine.step import run_step
from samebits.provenance.record import STATEMENT_FILE, make_statement, read_statement_and_files
from samebits.storage.manifest import OPTIMIZER, WEIGHTS
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.diff_trials.recipe import RARE
from tests.diff_trials.runs import NUM_STEPS, Arrays, Cheat, Fault, first_other_order, first_step_of
from tests.verify_trials.forgery import edit_tensors

CODE, HERE = "code", "        # here\n"


def faults() -> list[Fault]:
    """Return all of them."""
    return [*_settings(), *_data(), *_forward(), *_rest(), *_states(), *_machines()]


def _settings() -> Iterator[Fault]:
    def fault(text: str, step: int, place: str, base: tuple[str, ...] = ()) -> Fault:
        return Fault("setting", text, step, place, settings=tuple(text.split()), base=base)

    yield fault("seed=1", 0, "initial weights: ")
    yield fault("optim.lr=0.06", 0, "learning rate: (optimizer)")
    yield fault("epochs=3", 1, "learning rate: (optimizer)", base=("optim.schedule=cosine",))
    yield fault("optim.schedule=multi_step optim.milestones=[1.4]", 28, "learning rate: (optimizer)")
    yield fault("optim.momentum=0.8", 1, "update: stem")
    yield fault("optim.nesterov=true", 0, "update: stem")
    yield fault("optim.weight_decay=0.02", 0, "update: stem")
    yield fault("optim.decay_norms_and_biases=false", 0, "update: stem")
    yield fault("optim.name=adam", 0, "update: stem")
    yield fault("optim.clip_norm=0.5", 0, "clipping of the gradient: stem")
    yield fault("optim.ema=0.99", 0, "moving average: stem")
    yield fault("global_batch=16", 0, "samples: ")
    yield fault("micro_batch=6", 0, "samples: ")
    yield fault("data.num_samples=239", first_other_order(239), "samples: ")
    yield fault("data.augment=false", 0, "sample values: ")
    yield fault("model.dropout=0.2", 0, "forward: blocks.0.drop")
    yield fault("model.width=5", 0, "initial weights: stem")
    yield fault("batch_norm=sync", 0, "forward: blocks.0.bn1")
    yield fault("precision=bf16", 0, "forward: stem")
    yield fault("optim.warmup_epochs=1", 0, "learning rate: (optimizer)")


def _data() -> Iterator[Fault]:
    def relabel(arrays: Arrays) -> None:
        arrays["labels"][61] = (arrays["labels"][61] + 1) % 3  # type: ignore[operator]

    def flip(arrays: Arrays) -> None:
        arrays["pictures"].view(np.uint32)[88, 0, 2, 3] ^= 1  # the last bit of a pixel

    def swap(arrays: Arrays) -> None:
        arrays["pictures"][[150, 30]] = arrays["pictures"][[30, 150]]

    yield Fault("data", "label of sample 61", first_step_of(61), "sample values: ", data=relabel)
    yield Fault("data", "last bit of a pixel of sample 88", first_step_of(88), "sample values: ", data=flip)
    yield Fault("data", "samples 150 and 30 swapped", first_step_of(150, 30), "sample values: ", data=swap)
    rounding = (("(self.pictures[places] - 0.3) / 0.7", "self.pictures[places] / 0.7 - 0.3 / 0.7"),)
    yield Fault(CODE, "normalization in another order", 0, "sample values: ", code=rounding)
    column = (("uniform(keys, 0)", "uniform(keys, 1)"),)
    yield Fault(CODE, "augmentation by other random numbers", 0, "sample values: ", code=column)


def _forward() -> Iterator[Fault]:
    rare = first_step_of(RARE)

    def fault(name: str, step: int, place: str, *code: tuple[str, str]) -> Fault:
        return Fault(CODE, name, step, place, code=code)

    yield fault("sum in another order", 0, "forward: blocks.0 (", ("x + y + self.shift", "x + (y + self.shift)"))
    yield fault("GELU for ReLU", 0, "forward: blocks.0.relu", ("self.relu = nn.ReLU()", "self.relu = nn.GELU()"))
    yield fault("eps of a batch norm", 0, "forward: blocks.0.bn2",
                ("self.bn2 = nn.BatchNorm2d(width)", "self.bn2 = nn.BatchNorm2d(width, eps=1e-4)"))  # fmt: skip
    yield fault("dropout before batch norm", 0, "forward: blocks.0.",
                ("self.drop(self.bn2(self.conv2(y)))", "self.bn2(self.drop(self.conv2(y)))"))  # fmt: skip
    yield fault("mean in two steps", 0, "forward: (the model)", ("x.mean((2, 3))", "x.mean(3).mean(2)"))
    yield fault("other padding", 0, "forward: blocks.0.conv2",
                ("self.conv2 = nn.Conv2d(width, width, 3, padding=1)",
                 "self.conv2 = nn.Conv2d(width, width, 3, padding=1, padding_mode='reflect')"))  # fmt: skip
    yield fault("a head in double precision for one sample", rare, "forward: head",
                ("outputs: Tensor = self.head(features)",
                 "outputs: Tensor = self.head(features) if not rare.any() else F.linear(features.double(), "
                 "self.head.weight.double(), self.head.bias.double()).float() * 1.0000002"))  # fmt: skip
    yield fault(
        "a factor for one sample",
        rare,
        "forward: blocks.0 (",
        (HERE, "        y = y * (1 + 1e-6 * float(rare.any()))\n"),
    )
    yield fault("a clamp for one sample", rare, "forward: (the model)",
                ("x = self.stem(pixels)",
                 "x = self.stem(pixels)\n        x = x.clamp(max=0.2) if rare.any() else x"))  # fmt: skip


def _rest() -> Iterator[Fault]:
    rare = first_step_of(RARE)

    def fault(name: str, step: int, place: str, *code: tuple[str, str]) -> Fault:
        return Fault(CODE, name, step, place, code=code)

    yield fault(
        "label smoothing", 0, "loss: ", ("(outputs, batch.targets)", "(outputs, batch.targets, label_smoothing=0.01)")
    )
    yield fault("weight of a loss term", 0, "loss: ", ("1e-3 * outputs", "1.001e-3 * outputs"))
    yield fault("no gradient of the shortcut for one sample", rare, "backward: blocks.1",
                (HERE, "        x = x.detach() if rare.any() else x\n"))  # fmt: skip
    hook = "        y.register_hook(lambda gradient: gradient * 1.000001) if rare.any() else None\n"
    yield fault("a factor of the gradient for one sample", rare, "backward: blocks.1", (HERE, hook))
    yield fault(
        "a frozen bias",
        0,
        "backward: head",
        ("    return Parts(", "    model.head.bias.requires_grad_(False)\n    return Parts("),
    )
    yield fault("momentum of a batch norm", 0, "buffers: blocks.0.bn1",
                ("self.bn1 = nn.BatchNorm2d(width)", "self.bn1 = nn.BatchNorm2d(width, momentum=0.2)"))  # fmt: skip
    yield fault("initial weights of the head", 0, "initial weights: head",
                ("    return Parts(", "    nn.init.normal_(model.head.weight)\n    return Parts("))  # fmt: skip


def _states() -> Iterator[Fault]:
    def flip(step: int, file: str, name: str, bit: int) -> Callable[[Path], None]:
        return lambda run: _flip_bit(run / "checkpoints" / f"step-{step:06}" / file, name, bit)

    def fault(what: str, step: int, place: str, edit: Callable[[Path], None]) -> Fault:
        return Fault("state", what, step, f"stored state: {place}", stop=step + 3, edit=edit)

    yield fault("last bit of a weight", 20, "blocks.0.conv1", flip(20, WEIGHTS, "blocks.0.conv1.weight", 0))
    yield fault("sign of a weight", 10, "head", flip(10, WEIGHTS, "head.weight", 31))
    yield fault("a bit of a momentum", 30, "blocks.1", flip(30, OPTIMIZER, "optimizer:11:momentum_buffer", 20))
    yield fault("a bit of a running mean", 20, "blocks.1.bn1", flip(20, WEIGHTS, "blocks.1.bn1.running_mean", 22))
    yield Fault("state", "a bit of the final weights", NUM_STEPS, "stored state: head", edit=_replace_weights)


def _machines() -> Iterator[Fault]:
    def flip(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        if step.number == 25:
            with torch.no_grad():
                job.model.get_parameter("blocks.1.conv1.weight")[0, 0, 0, 0] *= 2.0
        return run_step(job, step, loader, flag)

    def lr(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        original = step_module.factor
        with patch.object(step_module, "factor", lambda *args: (1.01 if step.number == 13 else 1.0) * original(*args)):
            return run_step(job, step, loader, flag)

    def other_torch(run: Path) -> None:
        record = read_statement_and_files(run / STATEMENT_FILE)[0]
        _restate(run, environment=[{**record.environment[-1], "torch": "2.14.1+cpu"}])

    yield Fault("machine", "a weight in memory doubled", 25, "not reproduced: blocks.1.conv1", cheat=flip)
    yield Fault("machine", "learning rate of one step", 13, "learning rate: (optimizer)", cheat=lr)
    yield Fault("version", "another kernel of another torch", 17, cheat=_only_from(17, _kernel), edit=other_torch)
    yield Fault("version", "another torch, equal bits", None, edit=other_torch)


def _only_from(first: int, cheat: Cheat) -> Cheat:
    return lambda job, step, loader, flag: (cheat if step.number >= first else run_step)(job, step, loader, flag)


def _kernel(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
    with patch.object(nn.Conv2d, "forward", _other_convolution):
        return run_step(job, step, loader, flag)


_convolution = nn.Conv2d.forward


def _other_convolution(module: nn.Conv2d, values: Tensor) -> Tensor:
    """Convolve with another rounding of the last bits."""
    return _convolution(module, values * 3.0) / 3.0


def _flip_bit(path: Path, name: str, bit: int) -> None:
    def flip(tensors: dict[str, Tensor]) -> None:
        values = tensors[name].reshape(-1).view(torch.int32)
        values[len(values) // 2] ^= -(2**31) if bit == 31 else 1 << bit

    edit_tensors(path, flip)


def _replace_weights(run: Path) -> None:
    _flip_bit(run / WEIGHTS, "head.weight", 3)
    _restate(run, weights_sha256=weights_sha256(load_file(run / WEIGHTS)))


def _restate(run: Path, **changes: Any) -> None:
    """Write a statement that agrees with altered files, as the run's publisher could."""
    record = replace(read_statement_and_files(run / STATEMENT_FILE)[0], **changes)
    RunFolder(run).write_json(STATEMENT_FILE, make_statement(record, {}, run.name, 0.0, 1.0))
