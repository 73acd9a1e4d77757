"""One job of benchmarks/steps.py: a network on one batch in memory, in one tool, timed step by step.

    python benchmarks/peers/steps_job.py TOOL NETWORK

Common values come in variables; jobs take turns by the pipes BENCH_EAR and BENCH_MOUTH.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NUM_STEPS = 10**6  # it is stopped
SIZES = {  # batch, shape of one sample
    "resnet34": (16, (3, 128, 128)),
    "crnn": (16, (1, 32, 160)),
    "higherhrnet-w32": (2, (3, 256, 256)),
}


def network(name: str) -> nn.Module:
    """Make one of Samebits's networks, the same for all tools."""
    torch.manual_seed(0)
    if name == "resnet34":
        from torchvision.models import resnet34

        return resnet34(num_classes=5)
    if name == "crnn":
        from samebits.recipes.text.recipe import crnn

        return crnn(num_classes=100)
    from samebits.recipes.pose.config import ModelConfig
    from samebits.recipes.pose.model import HigherHRNet

    return HigherHRNet(ModelConfig(), 17)


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy for classes, CTC for time steps, squared error for maps."""
    if isinstance(outputs, list):
        return sum(F.mse_loss(maps, torch.ones_like(maps)) for maps in outputs)
    if outputs.dim() == 3:
        steps = torch.full((len(outputs),), outputs.shape[1])
        texts = targets.view(-1, 1).expand(-1, 4) + 1
        lengths = torch.full((len(outputs),), 4)
        return F.ctc_loss(outputs.log_softmax(2).transpose(0, 1), texts, steps, lengths)
    return F.cross_entropy(outputs, targets)


class InMemory(Dataset):
    """The samples of one batch, repeated."""

    def __init__(self, name: str) -> None:
        self.num, shape = SIZES[name]
        self.inputs = torch.randn(self.num, *shape, generator=torch.Generator().manual_seed(0))
        self.targets = torch.arange(self.num) % 5
        self.length = self.num * NUM_STEPS

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % self.num], self.targets[index % self.num]

    def batch(self, indices: Any, keys: Any) -> Any:
        """The same batch for Samebits."""
        from samebits.data.samples import Batch

        places = torch.from_numpy(indices)
        return Batch(self.inputs[places % self.num], self.targets[places % self.num], places)


class Clock:
    """Reports step times, and waits for its turn after the first step and then after every few."""

    def __init__(self) -> None:
        self._steps_of_turn = int(os.environ["BENCH_STEPS"])
        self._ear, self._mouth = int(os.environ["BENCH_EAR"]), int(os.environ["BENCH_MOUTH"])
        self._began, self._done = 0.0, 0

    def tick(self) -> None:
        """Record the end of a step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._done += 1
        if not self._began:
            self._say(first_step_s=time.time() - float(os.environ["BENCH_STARTED"]))
        elif self._done == self._steps_of_turn:
            step_s = (time.perf_counter() - self._began) / self._done
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if torch.cuda.is_available():
                memory = torch.cuda.max_memory_allocated()
            self._say(step_s=step_s, peak_bytes=memory)
        else:
            return
        if not os.read(self._ear, 1):
            sys.exit("the benchmark has ended")
        self._done, self._began = 0, time.perf_counter()

    def _say(self, **facts: float) -> None:
        os.write(self._mouth, (json.dumps(facts) + "\n").encode())


def sgd(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=fused or None)


def plain(name: str, clock: Clock, *, tuned: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network(name).to(device)
    if tuned:
        model = model.to(memory_format=torch.channels_last)
    optimizer = sgd(model, fused=tuned)
    for inputs, targets in DataLoader(InMemory(name), SIZES[name][0]):
        inputs, targets = inputs.to(device), targets.to(device)
        if tuned:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        clock.tick()


def accelerate(name: str, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = network(name)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(InMemory(name), SIZES[name][0]))
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(inputs), targets))
        optimizer.step()
        clock.tick()


def lightning(name: str, clock: Clock) -> None:
    from lightning import Callback, LightningModule, Trainer

    class Job(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(name)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    class Ticker(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    trainer = Trainer(
        accelerator="auto", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Ticker()],
    )  # fmt: skip
    trainer.fit(Job(), DataLoader(InMemory(name), SIZES[name][0]))


def samebits(name: str, clock: Clock, *more: str) -> None:
    """Run the loop's step with default settings and the given ones."""
    from samebits.cluster.world import alone
    from samebits.config.schema import RunConfig
    from samebits.engine.build import make_job
    from samebits.engine.parts import Parts
    from samebits.engine.step import run_step
    from samebits.metrics.classification import Accuracy

    samples, num = InMemory(name), SIZES[name][0]
    settings: dict[str, Any] = {"compile": True} if "compile" in more else {}
    config = RunConfig(recipe="steps", global_batch=num, micro_batch=num, optim={"lr": 1e-4}, **settings)
    parts = Parts(
        model=network(name),
        loss=lambda outputs, batch: {"loss": loss_of(outputs, batch.targets)},
        train_data=lambda: samples,
        eval_data=lambda: samples,
        metric=lambda: Accuracy(5),
    )
    job = make_job(config, lambda: parts, alone())
    loader, steps = job.open_loader(NUM_STEPS)
    for step in steps:
        run_step(job, step, loader)
        clock.tick()
    loader.close()


TOOLS: dict[str, Callable[[str, Clock], None]] = {
    "plain": lambda *job: plain(*job, tuned=False),
    "plain-tuned": lambda *job: plain(*job, tuned=True),
    "lightning": lightning,
    "accelerate": accelerate,
    "samebits": samebits,
    "samebits-compile": lambda *job: samebits(*job, "compile"),
}


def main() -> None:
    tool, name = sys.argv[1:]
    torch.set_num_threads(1)
    TOOLS[tool](name, Clock())


if __name__ == "__main__":
    main()
