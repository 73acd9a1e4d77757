"""Trainings that do something else than their settings, code and data say, each from or in one step."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.data.samples import Batch
from samebits.engine import step as step_module
from samebits.engine.job import Job
from samebits.engine.progress import StepResult
from samebits.engine.step import run_step
from tests.verify_trials.runs import Cheat


class Changed:
    """A loader whose batches are changed before training sees them.

    Args:
        loader: The run's loader.
        change: batch -> another batch.
    """

    def __init__(self, loader: Loader, change: Callable[[Batch], Batch]) -> None:
        self._loader, self._change = loader, change

    def batch(self, *request: Any, **options: bool) -> Batch:
        """Return the next batch, changed; see `Loader.batch`."""
        return self._change(self._loader.batch(*request, **options))


def with_sample(sample: int, other: int) -> Cheat:
    """Train on another sample's values in place of a sample's."""

    def change(batch: Batch, values: Tensor) -> Batch:
        inputs = batch.inputs.clone()  # keeps the memory format, on which the last bits depend
        inputs[batch.indices == sample] = values
        return replace(batch, inputs=inputs)

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        values = job.train_data.pictures[other]  # type: ignore[attr-defined]  # the tiny recipe's
        return run_step(job, step, Changed(loader, lambda batch: change(batch, values)), flag)  # type: ignore[arg-type]

    return cheat


def with_label(sample: int) -> Cheat:
    """Train on another label of a sample."""

    def change(batch: Batch) -> Batch:
        is_it = batch.indices == sample
        return replace(batch, targets=torch.where(is_it, (batch.targets + 1) % 3, batch.targets))

    return lambda job, step, loader, flag: run_step(job, step, Changed(loader, change), flag)  # type: ignore[arg-type]


def swapped_batches(at: int) -> Cheat:
    """Train in one step on the values of the step's samples in another order, with the labels as they were."""

    def change(batch: Batch) -> Batch:
        return replace(batch, inputs=batch.inputs.roll(1, 0))

    return _in_step(at, lambda job, step, loader, flag: run_step(job, step, Changed(loader, change), flag))  # type: ignore[arg-type]


def with_lr(at: int, factor: float, *, is_hidden: bool) -> Cheat:
    """Use another learning rate in one step, and record it, or the right one."""
    original = step_module.factor

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        with patch.object(step_module, "factor", lambda *args: factor * original(*args)):
            result = run_step(job, step, loader, flag)
        config = job.config
        right = config.peak_lr * original(step.number, job.num_steps, job.order.steps_per_epoch, config.optim)
        return replace(result, lr=right) if is_hidden else result

    return _in_step(at, cheat)


def with_hyperparameter(at: int, name: str, value: float) -> Cheat:
    """Use another momentum or weight decay in one step."""

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        before = [group[name] for group in job.optimizer.param_groups]
        for group in job.optimizer.param_groups:
            group[name] = value
        try:
            return run_step(job, step, loader, flag)
        finally:
            for group, old in zip(job.optimizer.param_groups, before, strict=True):
                group[name] = old

    return _in_step(at, cheat)


def with_updates(at: int, count: int) -> Cheat:
    """Update the weights twice or not at all in one step."""

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        update = job.optimizer.step

        def other() -> None:
            for _ in range(count):
                update()

        with patch.object(job.optimizer, "step", other):
            return run_step(job, step, loader, flag)

    return _in_step(at, cheat)


def without_dropout(at: int) -> Cheat:
    """Leave dropout out of one step."""

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        with _eval_mode(job, nn.Dropout):
            return run_step(job, step, loader, flag)

    return _in_step(at, cheat)


def without_average(at: int) -> Cheat:
    """Leave one update of the moving average out."""

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        with patch.object(job.average, "update", lambda *_: None):
            return run_step(job, step, loader, flag)

    return _in_step(at, cheat)


def with_loss_term(start: int, size: float) -> Cheat:
    """Train with another loss from a step on."""

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        if step.number == start:
            loss = job.parts.loss
            job.parts = replace(
                job.parts, loss=lambda outputs, batch: {**loss(outputs, batch), "more": size * outputs.abs().mean()}
            )
        return run_step(job, step, loader, flag)

    return cheat


def with_change_after(at: int, change: Callable[[Job], None]) -> Cheat:
    """Change the model or the optimizer state after a step."""

    def cheat(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        result = run_step(job, step, loader, flag)
        with torch.no_grad():
            change(job)
        return result

    return _in_step(at, cheat)


def nudge_weight(job: Job) -> None:
    """Change one weight by a thousandth."""
    next(job.model.parameters()).view(-1)[0].mul_(1.001)


def nudge_statistics(job: Job) -> None:
    """Change one running mean of batch norm, which training does not read."""
    next(each for each in job.model.modules() if isinstance(each, nn.BatchNorm2d)).running_mean.add_(0.01)  # type: ignore[union-attr,operator]


def forget_momentum(job: Job) -> None:
    """Set the momentum to zero."""
    for entries in job.optimizer.state.values():
        entries["momentum_buffer"].zero_()


def _in_step(at: int, cheat: Cheat) -> Cheat:
    return lambda job, step, loader, flag: (cheat if step.number == at else run_step)(job, step, loader, flag)


@contextlib.contextmanager
def _eval_mode(job: Job, kind: type[nn.Module]) -> Iterator[None]:
    # run_step does not change modes.
    modules = [each for each in job.model.modules() if isinstance(each, kind)]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()
