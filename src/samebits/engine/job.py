"""A run in one process: its state, and its assembly on the world's device, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, tee
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.loader import Loader, requests_of
from samebits.data.order import Order, Step
from samebits.data.samples import Samples
from samebits.engine.parts import Parts
from samebits.engine.progress import Progress, StepResult
from samebits.metrics.early_stop import last_step
from samebits.module.ema import ModelEma
from samebits.parallel.reduce import Reducer
from samebits.provenance.fingerprint import Fingerprint
from samebits.provenance.record import EVAL_BATCH

if TYPE_CHECKING:
    from samebits.module.compiled import Compiled


# A run in one process: the state that the loop, the step and the checkpoints work on.


# Fixed, because buffers and messages are sized before the first loss is known.
MAX_TERMS = 8  # number of loss terms that are summed over ranks for the report


@dataclass
class Job:
    """All objects that the loop needs, created once per process."""

    config: RunConfig  #: The settings.
    world: World  #: The world.
    parts: Parts  #: The recipe's parts.
    model: nn.Module  #: `parts.model`, on the device.
    optimizer: Optimizer  #: The optimizer of the trainable parameters.
    reducer: Reducer  #: Sums a step over the world.
    order: Order  #: The sample order.
    train_data: Samples  #: The training samples.
    eval_data: Samples  #: The validation samples.
    progress: Progress  #: The position of the run.
    #: The samples of further validation sets, by name.
    eval_sets: Mapping[str, Samples] = field(default_factory=dict)
    average: ModelEma | None = None  #: The moving average of the weights, if configured.
    loader: Loader | None = None  #: Reads this process's training batches, once it is open.
    compiled: Compiled | None = None  #: `model` as training calls it, if it is compiled.
    #: The run's identity, for checkpoints; see `run_identity`.
    identity: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=Fingerprint)  #: This process's fingerprint.
    #: The fingerprint in the checkpoint that the run was resumed from; None for a new run.
    resumed_from: Fingerprint | None = None
    stop_after: int | None = (
        None  #: Number of steps after which training stops and is saved; None: at its end.
    )
    #: Number and result of the last step that this process has applied.
    last_result: tuple[int, StepResult] | None = None
    resumed: Step | None = (
        None  #: The next step, if another world has begun it (`cluster.recovery=in_step`).
    )
    _before_evaluation: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run, unless it stops early."""
        steps = self.config.epochs * self.order.steps_per_epoch
        limit = self.config.max_steps
        return steps if limit is None else min(steps, limit)

    def last_step(self, evaluations: Iterable[tuple[int, Mapping[str, Any]]]) -> int:
        """Return the number of steps of a whole run with these evaluations: step and metrics of each, in order."""
        early = last_step(evaluations, self.config.stop_early, self.parts.monitor)
        return self.num_steps if early is None else early

    @property
    def is_complete(self) -> bool:
        """Whether no further step follows."""
        return self.progress.step == self.num_steps or self.progress.has_stopped_early

    @property
    def is_at_stop(self) -> bool:
        """Whether training stops here, to be resumed by another command."""
        return self.progress.step == self.stop_after

    @property
    def planned_stop(self) -> int:
        """Number of steps after which training ends or stops, unless it stops early."""
        return min(self.num_steps, self.stop_after or self.num_steps)

    def open_loader(
        self, stop: int | None = None, steps: Iterable[Step] | None = None
    ) -> tuple[Loader, Iterator[Step]]:
        """Open the loader of this process's batches from the current step up to `stop`, with its steps' plans."""
        if steps is None:
            start = self.progress.step
            stop = self.planned_stop if stop is None else stop
            first = (
                [self.resumed] if self.resumed is not None and self.resumed.number == start else []
            )
            steps = chain(first, self.order.steps(self.world, start=start + len(first), stop=stop))
        # Computed once: DataLoader workers are sent the requests of `ahead`, and the loop follows in `planned`.
        planned, ahead = tee(steps)
        self.loader = Loader(
            self.train_data,
            lambda: requests_of(ahead),
            self.world.device,
            num_workers=self.config.loader.num_workers,
            num_ranks_here=self.world.num_ranks_here,
            prefetch=self.config.loader.prefetch,
            channels_last=self.config.channels_last,
        )
        return self.loader, planned

    def close(self) -> None:
        """Close the loader of the training batches."""
        if self.loader is not None:
            self.loader.close()

    def count_step(self, step: Step, result: StepResult) -> None:
        """Count a step that was applied or skipped. Calls no other rank."""
        self.progress.step = step.number + 1
        # Progress advances for skipped steps too: the sample order depends on the step number only.
        self.progress.num_samples += step.num_samples if result.is_finite else 0

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context for training that measures compile time and keeps the watchdog from taking it for a hang."""
        return (
            nullcontext() if self.compiled is None else self.compiled.watched(self.world.activity)
        )

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to validate: the moving average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    def state(self) -> Mapping[str, Tensor]:
        """Return the model's state_dict without copies: tensors of any shape."""
        state: Mapping[str, Tensor] = self.model.state_dict()
        return state

    def final_weights(self) -> Mapping[str, Tensor]:
        """Return the weights to publish, of any shape: the moving average, if there is one."""
        return self.state() if self.average is None else self.average.state

    def is_evaluation_due(self) -> bool:
        """Return whether the last step is followed by a validation."""
        step = self.progress.step
        return step > 0 and (
            self.config.eval_interval.is_due(step, self.order.steps_per_epoch, 0.0)
            or step == self.num_steps
        )

    def is_evaluated(self) -> bool:
        """Return whether the current weights were validated."""
        return self.progress.evaluated_step == self.progress.step

    def begin_evaluation(self) -> None:
        """Remember the progress, for `forget_evaluation`."""
        names = (
            "evaluated_step",
            "metrics",
            "evaluations",
            "best",
            "stop_best",
            "num_stale",
            "has_stopped_early",
        )
        self._before_evaluation = {name: getattr(self.progress, name) for name in names}

    def forget_evaluation(self) -> None:
        """Undo the last validation's part of the progress, since a lost rank had not completed it."""
        self.progress = replace(self.progress, **self._before_evaluation)

    def note_world(self) -> None:
        """Record the current world, if the run had another one or another environment so far."""
        self.progress.fingerprint = self.fingerprint.to_json()
        # An environment or code that changes starts a new entry: it may explain other bits later (ADR 27).
        now = {
            "size": self.world.size,
            "environment": self.fingerprint.environment,
            "code": self.fingerprint.code,
        }
        # the last digits of a validation's loss follow from it
        now[EVAL_BATCH] = self.config.eval_batch
        worlds = self.progress.worlds
        if not worlds or {**worlds[-1], **now} != worlds[-1]:
            worlds.append({"size": self.world.size, "from_step": self.progress.step, **now})
