"""A run in one process: its state, and its assembly on the world's device, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, tee
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.loader import Loader, requests_of
from samebits.data.order import Order, Step
from samebits.data.samples import Samples
from samebits.engine.build import (
    build_parts,
    check_not_empty,
    make_order,
    open_data,
    open_eval_sets,
    prepare_model,
)
from samebits.engine.parts import Parts
from samebits.engine.progress import Progress, StepResult, init_scale
from samebits.metrics.early_stop import last_step
from samebits.module.activation_checkpointing import checkpoint_activations
from samebits.module.check_model import check_batches, check_trainable
from samebits.module.determinism import use_deterministic_algorithms
from samebits.module.ema import ModelEma
from samebits.optim.build import optimizer
from samebits.parallel.exact_fsdp.replica import ExactShards
from samebits.parallel.reduce import StepSum
from samebits.parallel.replica import Replica, WholeReplica
from samebits.provenance.fingerprint import Fingerprint, take_fingerprint
from samebits.provenance.same_run import check_ranks_agree
from samebits.provenance.statement import EVAL_BATCH

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
    replica: Replica  #: A whole copy of the model, or this rank's shards.
    reducer: StepSum  #: Sums a step over the world.
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
    #: Warnings to report when training starts or resumes.
    warnings: list[str] = field(default_factory=list)
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


# Assembly of a run's job on the world's device, equal on all ranks.


def make_job(
    config: RunConfig, build: Callable[[], Parts], world: World, *, is_restart: bool = False
) -> Job:
    """Build a recipe's parts on the world's device, equal on all ranks, and open its data; a restart checks once only.

    Raises:
        LaunchError: The ranks differ in code, settings, data or model.
        DataError: The data cannot be read.
        ConfigError: The settings do not fit data or model; a second pass has other values.
    """
    use_deterministic_algorithms(config, world.device)
    parts = build_parts(config, build)
    check_trainable(parts.model)
    parts.metric()  # it checks that the metric has all members
    # A single process always has a whole model.
    is_sharded = config.parallel == "fsdp" and world.size > 1
    model = prepare_model(parts.model, config, world.device)
    train_data = open_data(config, parts, train=True)
    eval_data = open_data(config, parts, train=False)
    eval_sets = open_eval_sets(config, parts)
    sizes = {"training": len(train_data), "validation": len(eval_data)}
    sizes |= {f"{name} validation": len(samples) for name, samples in eval_sets.items()}
    fingerprint = take_fingerprint(
        config, parts.loss, model, (train_data, eval_data), world.device,
        num_ranks_here=world.num_ranks_here, is_restart=is_restart, is_sharded=is_sharded,
    )  # fmt: skip
    check_ranks_agree(world, config, model, sizes, fingerprint)
    check_not_empty(sizes)
    check_batches(config, model, len(train_data), parts.input_shape)
    checkpoint_activations(model, config.activation_checkpointing)
    replica: Replica = ExactShards(model, world) if is_sharded else WholeReplica(model, world)
    average = config.optim.ema
    order = make_order(config, train_data, is_sharded=is_sharded)
    return Job(
        config=config,
        world=world,
        parts=parts,
        model=model,
        optimizer=optimizer(replica.trained, config.optim),
        reducer=replica.make_reducer(
            order,
            num_extras=MAX_TERMS,
            synchronized=config.batch_norm == "sync",
        ),
        order=order,
        train_data=train_data,
        eval_data=eval_data,
        eval_sets=eval_sets,
        progress=Progress(loss_scale=init_scale(config), train_size=len(train_data)),
        average=ModelEma(model, average, replica.state) if average is not None else None,
        replica=replica,
        compiled=_compile(model, world) if config.compile else None,
        fingerprint=fingerprint,
    )


def _compile(model: nn.Module, world: World) -> Compiled:
    from samebits.module.compiled import Compiled  # late: torch's compiler takes a second to import

    return Compiled(model, world.device)


def init_weights(job: Job, build: Callable[[], Parts]) -> Mapping[str, str]:
    """Initialize the fresh model on rank 0 and broadcast it; return the recipe's rows for the run's header.

    `build` builds the recipe's parts again, for a whole model if this one is sharded.
    """
    start = job.parts.init_weights
    if start is None:
        return {}
    # Only rank 0 reads the file of pretrained weights; the other ranks need no access to it (ADR 12).
    model: nn.Module | None = job.model if job.world.is_main else None
    if (
        model is not None and job.replica.is_sharded
    ):  # the recipe fills a whole model, on rank 0's host
        model = build_parts(job.config, build).model
    rows = collectives.run_on_rank0(
        job.world, lambda: dict(start(model)) if model is not None else {}
    )
    job.replica.load(model.state_dict() if model is not None else None)
    # Otherwise the average would start from the recipe's random weights, not from the loaded ones.
    if job.average is not None:
        job.average.reset(job.state())
    return rows
