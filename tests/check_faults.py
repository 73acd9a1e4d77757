"""Faults that are planted into a small recipe, and what `samebits check` has to find of each."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "# the fault"
TEMPLATE = """
import functools, hashlib, itertools, os, random, secrets, time, uuid
from datetime import datetime

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samebits import Accuracy, DatasetSamples, Parts

PRESET = {"epochs": 2, "global_batch": 16, "micro_batch": 4, "optim": {"lr": 0.05, "momentum": 0.9}}
NAMES = ["cat", "dog", "cow"]
MODULE


class Points(torch.utils.data.Dataset):
    def __init__(self, num):
        generator = torch.Generator().manual_seed(num)
        self.labels = torch.randint(0, 3, (num,), generator=generator)
        self.points = torch.randn(num, 8, generator=generator) + self.labels[:, None]
        DATA

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        point, label = self.points[index], int(self.labels[index])
        SAMPLE
        return point + 0.1 * torch.randn(8) + 0.1 * float(np.random.randn()) + 0.1 * random.random(), label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.1)
        MODEL

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        FORWARD
        return self.last(self.drop(x))


def loss(outputs, batch):
    value = F.cross_entropy(outputs, batch.targets)
    LOSS
    return {"cross_entropy": value}


class Metric(Accuracy):
    pass
    METRIC


def init_weights(model):
    INIT
    return {}


def build(config):
    model = Net()
    BUILD
    return Parts(
        model=model,
        loss=loss,
        train_data=lambda: DatasetSamples(Points(101)),
        eval_data=lambda: DatasetSamples(Points(30)),
        metric=lambda: Metric(3),
        init_weights=init_weights,
    )
"""
SLOTS = ("MODULE", "DATA", "SAMPLE", "MODEL", "FORWARD", "LOSS", "METRIC", "INIT", "BUILD")


@dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
        name: What it is.
        kinds: Kinds of cause that are right; empty where the recipe has no fault.
        code: Lines for the slots of the template; the faulty line is marked.
        lines: Whether the cause has to name the marked line.
    """

    name: str
    kinds: tuple[str, ...]
    code: Mapping[str, str] = field(default_factory=dict)
    has_line: bool = True


M = MARK
FAULTS = (
    Fault("a numpy generator of the dataset", ("generator",), {
        "DATA": "self.rng = np.random.default_rng(0)", "SAMPLE": f"point = point + self.rng.normal()  {M}"}),
    Fault("a random.Random of the dataset", ("generator",), {
        "DATA": "self.rng = random.Random(0)", "SAMPLE": f"point = point * self.rng.random()  {M}"}),
    Fault("a torch.Generator of the dataset", ("generator",), {
        "DATA": "self.rng = torch.Generator().manual_seed(0)",
        "SAMPLE": f"point = point + torch.randn(8, generator=self.rng)  {M}"}),
    Fault("a generator without a seed in each sample", ("entropy",), {
        "SAMPLE": f"point = point + np.random.default_rng().normal()  {M}"}),
    Fault("secrets in a sample", ("entropy",), {"SAMPLE": f"point = point + secrets.randbelow(100) / 100  {M}"}),
    Fault("uuid4 in a sample", ("entropy",), {"SAMPLE": f"point = point + uuid.uuid4().int % 100 / 100  {M}"}),
    Fault("the clock in a sample", ("clock",), {"SAMPLE": f"point = point + time.time() % 1  {M}"}),
    Fault("datetime in a sample", ("clock",), {"SAMPLE": f"point = point + datetime.now().microsecond / 1e6  {M}"}),
    Fault("the process id in a sample", ("process",), {"SAMPLE": f"point = point + os.getpid() % 7  {M}"}),
    Fault("a call counter in the dataset", ("state",), {
        "DATA": "self.reads = 0", "SAMPLE": f"self.reads += 1  {M}\n        point = point * (1 + self.reads / 100)"}),
    Fault("a sample changed in place", ("state",), {"SAMPLE": f"point += 0.1  {M}"}),
    Fault("an iterator of the dataset", ("state", "iterator"), {
        "DATA": "self.counter = itertools.count()",
        "SAMPLE": f"point = point + next(self.counter) / 100  {M}"}),
    Fault("augmented samples in a cache", ("cache", "state"), {
        "DATA": "self.kept = {}",
        "SAMPLE": "if index in self.kept:\n            return self.kept[index]\n"
                  "        point = point + torch.randn(8)\n"
                  f"        self.kept[index] = point, label  {M}"}),
    Fault("the DataLoader worker's id", ("worker",), {
        "SAMPLE": f"worker = torch.utils.data.get_worker_info()  {M}\n"
                  "        point = point + (worker.id if worker else 0)"}),
    Fault("the DataLoader worker's seed", ("worker",), {
        "SAMPLE": f"worker = torch.utils.data.get_worker_info()  {M}\n"
                  "        point = point + (worker.seed % 100 / 100 if worker else 0)"}),
    Fault("hash() of a text in a sample", ("hash",), {"SAMPLE": f"point = point + hash(NAMES[label]) % 10  {M}"}),
    Fault("the order of a set of class names", ("set order",), {
        "DATA": f"order = list(set(NAMES))  {M}\n"
                "        self.labels = torch.tensor([order.index(NAMES[label]) for label in self.labels])"}),
    Fault("random numbers at import", ("import",), {
        "MODULE": f"SHIFT = np.random.randn(8).astype('float32')  {M}", "SAMPLE": "point = point + SHIFT"}),
    Fault("an unseeded generator where the data is opened", ("entropy",), {
        "DATA": f"self.points = self.points[np.random.default_rng().permutation(num)]  {M}"}),
    Fault("a call counter in the module", ("state",), {
        "MODEL": "self.calls = 0", "FORWARD": f"self.calls += 1  {M}\n        x = x * (1 + self.calls / 100)"}),
    Fault("a numpy generator of the module", ("generator",), {
        "MODEL": "self.rng = np.random.default_rng(0)", "FORWARD": f"x = x + float(self.rng.normal())  {M}"}),
    Fault("a torch.Generator of the module", ("generator",), {
        "MODEL": "self.rng = torch.Generator().manual_seed(0)",
        "FORWARD": f"x = x + torch.randn(16, generator=self.rng)  {M}"}),
    Fault("a buffer written out of place", ("replaced",), {
        "MODEL": "self.register_buffer('mean', torch.zeros(16))",
        "FORWARD": f"self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  {M}\n        x = x - self.mean"}),
    Fault("a running mean in an attribute", ("state",), {
        "MODEL": "self.mean = torch.zeros(16)",
        "FORWARD": f"self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  {M}\n        x = x - self.mean"}),
    Fault("a buffer that is not saved", ("unsaved",), {
        "MODEL": "self.averaged_buffers = ('mean',)\n"
                 "        self.register_buffer('mean', torch.zeros(16), persistent=False)",
        "FORWARD": "x = x - self.mean\n        if self.training:\n"
                   f"            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))  {M}"}),
    Fault("the clock in forward", ("clock",), {"FORWARD": f"x = x * (1 + time.perf_counter() % 1)  {M}"}),
    Fault("an operation without a deterministic form", ("operation",), {
        "FORWARD": f"x = x.clone().put_(torch.tensor([0, 0]), x.new_tensor([1.0, 2.0]))  {M}"}),
    Fault("the rank in forward", ("rank",), {"FORWARD": f"x = x * (1 + int(os.environ.get('RANK', 0)))  {M}"}),
    Fault("a parameter written in forward", ("written",), {
        "FORWARD": f"self.last.weight.data.mul_(0.99)  {M}"}),
    Fault("noise in the backward pass", ("generator",), {
        "MODEL": "self.rng = torch.Generator().manual_seed(0)",
        "FORWARD": "if x.requires_grad:\n"
                   f"            x.register_hook(lambda g: g + torch.randn(g.shape, generator=self.rng))  {M}"}),
    Fault("a counter in a global of the loss", ("state",), {
        "MODULE": "CALLS = [0]", "LOSS": f"CALLS[0] += 1  {M}\n    value = value * (1 + CALLS[0] / 100)"}),
    Fault("a loss that is a sum", ("loss is a sum",), {
        "LOSS": f"value = F.cross_entropy(outputs, batch.targets, reduction='sum')  {M}"}, has_line=False),
    Fault("a metric that averages averages", ("metric merge",), {
        "METRIC": "def result(self):\n"
                  "        return {'top1': self.mean}\n\n"
                  "    mean = None\n\n"
                  f"    def merge(self, state):  {M}\n"
                  "        super().merge(state)\n"
                  "        confusion = torch.tensor(state['confusion'])\n"
                  "        own = float(confusion.diagonal().sum() / max(1, confusion.sum()))\n"
                  "        self.mean = own if self.mean is None else (self.mean + own) / 2"}),
    Fault("a metric that adds up floats in the order of the ranks", ("metric merge",), {
        "METRIC": "total = 0.0\n\n"
                  "    def add(self, outputs, batch):\n"
                  "        super().add(outputs, batch)\n"
                  "        self.total += float(outputs.double().exp().sum()) / 3\n\n"
                  "    def state(self):\n"
                  "        return {**super().state(), 'total': self.total}\n\n"
                  f"    def merge(self, state):  {M}\n"
                  "        super().merge(state)\n"
                  "        self.total += state['total']\n\n"
                  "    def result(self):\n"
                  "        return {**super().result(), 'total': self.total}"}),
    Fault("initial weights from an unseeded generator", ("entropy",), {
        "INIT": f"model.last.weight.data += float(np.random.default_rng().normal())  {M}"}),
    Fault("no fault: what is seeded, and state that has no effect", (), {
        "MODULE": "STARTED = time.time()\nREADS = [0]",
        "SAMPLE": "READS[0] += 1",
        "MODEL": "self.last_shape, self.took_s = None, 0.0\n"
                 "        self.averaged_buffers = ('steps',)\n"
                 "        self.register_buffer('steps', torch.zeros((), dtype=torch.int64))",
        "FORWARD": "began = time.perf_counter()\n        self.last_shape, self.host = x.shape, os.getpid()\n"
                   "        self.steps.add_(1)\n"
                   "        x = x + float(np.random.randn()) * 0.01\n"
                   "        self.took_s += time.perf_counter() - began"}),
)  # fmt: skip


def source_of(fault: Fault) -> str:
    """Return the recipe with a fault."""
    text = TEMPLATE
    for slot in SLOTS:
        text = text.replace(slot, fault.code.get(slot, "pass"), 1)
    return text


def _run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samebits", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def check(fault: Fault, folder: Path, run: Callable[[Sequence[str], Path], Any] = _run) -> dict[str, Any]:
    """Write the recipe and check it; return the report, with the exit code as "code".

    Args:
        fault: What the recipe has.
        folder: For the recipe, and the working directory.
        run: (arguments of `samebits`, working directory) -> its exit code and texts, as of `subprocess.run`.
    """
    recipe = folder / "faulty.py"
    recipe.write_text(source_of(fault), encoding="utf-8")
    done = run(["check", str(recipe), "--json"], folder)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = {"findings": [], "error": (done.stderr or done.stdout).strip()}
    return {**report, "code": done.returncode}


def verdict(fault: Fault, report: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a fault was found, and whether its cause was named: kind and line."""
    is_found = report["code"] == (1 if fault.kinds else 0)
    if not fault.kinds or not report["findings"]:
        return is_found, is_found and not fault.kinds
    marked = [number for number, line in enumerate(source_of(fault).splitlines(), start=1) if MARK in line]
    finding = report["findings"][0]
    is_named = finding["kind"] in fault.kinds and (not fault.has_line or finding["line"] in marked)
    return is_found and bool(report["findings"]), is_named
