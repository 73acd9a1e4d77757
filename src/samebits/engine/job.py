"""A run in one process: the state that the loop, the step and the checkpoints work on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.loader import Loader, requests_of
from samebits.data.order import Order, Step
from samebits.data.resumed_step import ResumedStep
from samebits.data.samples import Samples
from samebits.engine.parts import Parts
from samebits.errors import CheckpointError
from samebits.metrics.early_stop import last_step
from samebits.module.ema import ModelEma
from samebits.parallel.reduce import Reducer
from samebits.parallel.replica import Replica
from samebits.provenance.fingerprint import Fingerprint
from samebits.version import __version__

if TYPE_CHECKING:
    from samebits.engine.step import StepResult
    from samebits.module.compiled import Compiled
    from samebits.parallel.exact_fsdp.reducer import ExactShardedReducer
    from samebits.parallel.sharded import ShardedReducer

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MAX_TERMS = 8  # number of loss terms that are summed over ranks for the report


@dataclass
class Progress:
    """The position of a run. With weights and optimizer state, it is all that a checkpoint contains.

    Attributes:
        step: Number of optimizer steps done; epoch, sample order, random numbers and learning rate follow from it.
        num_samples: Number of samples trained on, counted in each epoch, without those of skipped steps.
        evaluated_step: `step` at the last validation.
        metrics: The metrics of that validation.
        best: Step, metric and value of the best validation so far.
        stop_best: Best value so far by the rule of `stop_early`.
        num_stale: Number of validations since then.
        has_stopped_early: Whether `stop_early` has ended the run.
        skipped: Steps that were not applied because their loss or gradient was not finite.
        num_overflows: Number of steps that were not applied because the scaled gradient overflowed fp16.
        loss_scale: Factor of the loss before the backward pass.
        scale_age: Number of steps since the dynamic loss scale changed.
        worlds: World sizes and environments of the run so far, each with its first step.
        seconds: Training time so far, without validation and checkpoints.
        data_s: Part of it that rank 0 waited for samples, in seconds.
        train_size: Number of training samples; None in checkpoints that predate it.
        fingerprint: See `Fingerprint`; empty in checkpoints that predate it.
        chain: The link of the step record before the next step, 64 hex digits (`provenance/step_log.py`); empty if
            steps are not recorded.
    """

    step: Count = 0
    num_samples: Count = 0
    evaluated_step: Count = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    stop_best: float | None = None
    num_stale: Count = 0
    has_stopped_early: bool = False
    skipped: list[int] = field(default_factory=list)
    num_overflows: Count = 0
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    scale_age: Count = 0
    worlds: list[dict[str, Any]] = field(default_factory=list)
    seconds: Seconds = 0.0
    data_s: Seconds = 0.0
    train_size: Count | None = None
    fingerprint: dict[str, dict[str, str]] = field(default_factory=dict)
    chain: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""

    def to_json(self) -> dict[str, Any]:
        """Return the progress as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any], path: Path) -> Progress:
        """Read the result of `to_json`.

        Args:
            state: The state in a checkpoint.
            path: The checkpoint, for errors.

        Raises:
            CheckpointError: The checkpoint has entries of another version of Samebits, or was altered.
        """
        unknown = sorted(state.keys() - {entry.name for entry in fields(cls)})
        try:
            progress = TypeAdapter(cls).validate_python(state)
            if progress.best is not None:
                step, value = progress.best["step"], progress.best["value"]
                if not (isinstance(step, int) and isinstance(value, int | float)):
                    raise TypeError(f"best has step {step!r} and value {value!r}")
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            raise _not_progress(path, unknown, str(error).replace("\n", " ")) from None
        if unknown:
            raise _not_progress(path, unknown, "")
        return progress

    def check_position(self, step: int, num_steps: int, metric: str, path: Path) -> None:
        """Check that a run can resume from this progress.

        Args:
            step: The checkpoint's own step.
            num_steps: Number of steps of the whole run.
            metric: The monitored metric.
            path: The checkpoint, for errors.

        Raises:
            CheckpointError: The run has no such position, or the last validation lacks the metric.
        """
        if self.step != step or not self.evaluated_step <= step <= num_steps:
            given = f"step {self.step:,} of {num_steps:,}, evaluated after step {self.evaluated_step:,}"
            raise _not_progress(path, [], f"{given}, in the checkpoint of step {step:,}")
        if self.evaluated_step and metric not in self.metrics:
            raise _not_progress(path, [], f"its last validation has no metric {metric}")


def _not_progress(path: Path, unknown: list[str], given: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} has a state that this version of Samebits does not write",
        given=f"unknown entries: {', '.join(unknown)[:200]}" if unknown else given[:200],
        cause="A newer version of Samebits wrote it." if unknown else "It was altered.",
        fix=f"Resume with the version that wrote it; this is {__version__}.",
    )


@dataclass
class Job:
    """All objects that the loop needs, created once per process.

    Attributes:
        config: The settings.
        world: The world.
        parts: The recipe's parts.
        model: `parts.model`, on the device.
        optimizer: The optimizer of the trainable parameters.
        replica: A whole copy of the model, or this rank's shards.
        reducer: Sums a step over the world.
        order: The sample order.
        train_data: The training samples.
        eval_data: The validation samples.
        eval_sets: The samples of further validation sets, by name.
        progress: The position of the run.
        average: The moving average of the weights, if configured.
        loader: Reads this process's training batches, once it is open.
        compiled: `model` as training calls it, if it is compiled.
        identity: The run's identity, for checkpoints; see `run_identity`.
        fingerprint: This process's fingerprint.
        resumed_from: The fingerprint in the checkpoint that the run was resumed from; None for a new run.
        warnings: Warnings to report when training starts or resumes.
        stop_after: Number of steps after which training stops and is saved; None: at its end.
        last_result: Number and result of the last step that this process has applied.
        resumed: The next step, if another world has begun it (`cluster.recovery=in_step`).
    """

    config: RunConfig
    world: World
    parts: Parts
    model: nn.Module
    optimizer: Optimizer
    replica: Replica
    reducer: Reducer | ShardedReducer | ExactShardedReducer
    order: Order
    train_data: Samples
    eval_data: Samples
    progress: Progress
    eval_sets: Mapping[str, Samples] = field(default_factory=dict)
    average: ModelEma | None = None
    loader: Loader | None = None
    compiled: Compiled | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    resumed_from: Fingerprint | None = None
    warnings: list[str] = field(default_factory=list)
    stop_after: int | None = None
    last_result: tuple[int, StepResult] | None = None
    resumed: ResumedStep | None = None
    _before_evaluation: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run, unless it stops early."""
        steps, limit = self.config.epochs * self.order.steps_per_epoch, self.config.max_steps
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
        """Open the loader of this process's batches, with the plans of its steps, from the current step on.

        Args:
            stop: The step after the last one; None: the end of the run.
            steps: The plans; None: those of an even division.
        """
        if steps is None:
            start = self.progress.step
            first = [self.resumed] if self.resumed is not None and self.resumed.number == start else []
            stop = self.planned_stop if stop is None else stop
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

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context for training that measures compile time and keeps the watchdog from taking it for a hang."""
        return nullcontext() if self.compiled is None else self.compiled.watched(self.world.activity)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to validate: the moving average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    def state(self) -> Mapping[str, Tensor]:
        """Return the model's state_dict without copies; of a sharded model this rank's shards, (rows, ...)."""
        return self.replica.state()

    def final_weights(self) -> Mapping[str, Tensor]:
        """Return the weights to publish: the moving average, if there is one. Called on all ranks.

        Tensors have the shapes of the model's own. A sharded model's weights are whole on rank 0 only.
        """
        state = self.state() if self.average is None else self.average.state
        return self.replica.gather_all(state)

    def is_evaluation_due(self) -> bool:
        """Return whether the last step is followed by a validation."""
        step = self.progress.step
        return step > 0 and (
            self.config.eval_interval.is_due(step, self.order.steps_per_epoch, 0.0) or step == self.num_steps
        )

    def is_evaluated(self) -> bool:
        """Return whether the current weights were validated."""
        return self.progress.evaluated_step == self.progress.step

    def begin_evaluation(self) -> None:
        """Remember the progress, for `forget_evaluation`."""
        names = ("evaluated_step", "metrics", "best", "stop_best", "num_stale", "has_stopped_early")
        self._before_evaluation = {name: getattr(self.progress, name) for name in names}

    def forget_evaluation(self) -> None:
        """Undo the last validation's part of the progress, since a lost rank had not completed it."""
        self.progress = replace(self.progress, **self._before_evaluation)

    def note_world(self) -> None:
        """Record the current world, if the run had another one or another environment so far."""
        self.progress.fingerprint = self.fingerprint.to_json()
        now = {"size": self.world.size, "environment": self.fingerprint.environment, "code": self.fingerprint.code}
        worlds = self.progress.worlds
        if not worlds or {**worlds[-1], **now} != worlds[-1]:
            worlds.append({"size": self.world.size, "from_step": self.progress.step, **now})
