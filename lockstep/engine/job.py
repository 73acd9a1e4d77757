"""A run as one process holds it: what the loop, the step and the checkpoints work on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.cluster.world import World
from lockstep.config.schema import RunConfig
from lockstep.data.loader import Loader, training_requests
from lockstep.data.order import Order
from lockstep.data.samples import Samples
from lockstep.engine.parts import Parts
from lockstep.errors import CheckpointError
from lockstep.module.ema import ModelEma
from lockstep.parallel.reduce import Reducer
from lockstep.provenance.fingerprint import Fingerprint
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.module.compiled import Compiled
    from lockstep.parallel.sharded import ShardedReducer, Shards

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MAX_TERMS = 8  # named terms of a loss that are summed over ranks for the report


@dataclass
class Progress:
    """How far a run is. With weights and optimizer state, this is all that a checkpoint holds.

    Attributes:
        step: Optimizer steps done; epoch, order, random numbers and learning rate follow from it.
        num_samples: Samples trained on, each as often as it was; those of skipped steps are not counted.
        evaluated_step: Value of `step` at the last evaluation.
        metrics: What that evaluation gave.
        best: Of the best evaluation so far: step, metric, value.
        skipped: Steps that were not applied, as their loss was not finite.
        num_overflows: Steps that were not applied, as fp16 had no room for their scaled gradient.
        loss_scale: What the loss is multiplied by before the backward pass.
        scale_age: Steps since a dynamic loss scale has last changed.
        worlds: World sizes and environments that the run had, each with the step from which on.
        seconds: Training time so far, evaluation and checkpoints left out.
        data_s: How much of it rank 0 waited for samples.
        train_size: Samples of the training set; None in checkpoints from before it was kept.
        fingerprint: Of code, data and environment, see `Fingerprint`; empty in checkpoints from before it was kept.
    """

    step: Count = 0
    num_samples: Count = 0
    evaluated_step: Count = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    skipped: list[int] = field(default_factory=list)
    num_overflows: Count = 0
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    scale_age: Count = 0
    worlds: list[dict[str, Any]] = field(default_factory=list)
    seconds: Seconds = 0.0
    data_s: Seconds = 0.0
    train_size: Count | None = None
    fingerprint: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any], path: Path) -> Progress:
        """The inverse of `to_json`.

        Args:
            state: What a checkpoint holds.
            path: The checkpoint, for errors.

        Raises:
            CheckpointError: The checkpoint is of a version of Lockstep with other entries, or was altered.
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

    def check_position(self, step: int, num_steps: int, figure: str, path: Path) -> None:
        """See that a run can go on from here.

        Args:
            step: The checkpoint's own step.
            num_steps: Of the whole run.
            figure: What its evaluations are compared by.
            path: The checkpoint, for errors.

        Raises:
            CheckpointError: It is none of the run's positions, or its last evaluation has no such figure.
        """
        if self.step != step or not self.evaluated_step <= step <= num_steps:
            given = f"step {self.step:,} of {num_steps:,}, evaluated after step {self.evaluated_step:,}"
            raise _not_progress(path, [], f"{given}, in the checkpoint of step {step:,}")
        if self.evaluated_step and figure not in self.metrics:
            raise _not_progress(path, [], f"its last evaluation has no figure {figure}")


def _not_progress(path: Path, unknown: list[str], problem: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} can't be used: its state is not one that this version of Lockstep writes",
        unknown=", ".join(unknown)[:200],
        problem=problem[:200],
        cause="a newer version of Lockstep wrote it" if unknown else "it was altered",
        fix=f"resume with the version that wrote it; this is {__version__}",
    )


@dataclass
class Job:
    """Everything that the loop needs, made once for a process.

    Attributes:
        config: The settings.
        world: The ranks.
        parts: What the recipe handed over.
        model: `parts.model`, on the device.
        optimizer: Over the model's trainable parameters.
        reducer: Sums a step over the world.
        order: Which samples a step has.
        train_data: The training samples.
        eval_data: The held-out samples.
        progress: How far the run is.
        average: The moving average of the weights, if there is to be one.
        loader: What reads this process's training batches, once it is open.
        shards: This rank's parts of the model, if it is sharded.
        compiled: `model` as training calls it, if it is compiled.
        on_all_gpus: The same, if one process trains on several GPUs.
        identity: What decides the bits beside data and code, for checkpoints; see `run_identity`.
        fingerprint: What this process trains with.
        resumed_from: The same of the process that wrote the checkpoint; None where there was none to go on from.
        warnings: What is to be reported when the run begins or goes on.
    """

    config: RunConfig
    world: World
    parts: Parts
    model: nn.Module
    optimizer: Optimizer
    reducer: Reducer | ShardedReducer
    order: Order
    train_data: Samples
    eval_data: Samples
    progress: Progress
    average: ModelEma | None = None
    loader: Loader | None = None
    shards: Shards | None = None
    compiled: Compiled | None = None
    on_all_gpus: nn.Module | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    resumed_from: Fingerprint | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.order.steps_per_epoch

    @property
    def num_ranks_here(self) -> int:
        """Ranks on this machine."""
        return -(-self.world.size // self.world.num_hosts)

    def open_loader(self) -> Loader:
        """What reads this process's batches of the steps that are left."""
        self.loader = Loader(
            self.train_data,
            lambda: training_requests(self.order, self.world, self.progress.step, self.num_steps),
            self.world.device,
            num_workers=self.config.loader.num_workers,
            num_ranks_here=self.num_ranks_here,
            prefetch=self.config.loader.prefetch,
            channels_last=self.config.channels_last,
        )
        return self.loader

    def compiling(self) -> AbstractContextManager[None]:
        """Around training: time spent compiling is counted, and no hang."""
        return nullcontext() if self.compiled is None else self.compiled.watched(self.world.activity)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Let the model have the weights by which the run is judged: their average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    def state(self) -> Mapping[str, Tensor]:
        """The model's state_dict, in its own memory; of a sharded model this rank's parts."""
        return self.model.state_dict() if self.shards is None else self.shards.state()

    def final_weights(self) -> Mapping[str, Tensor]:
        """The weights that stay: their average, if there is one. Called on all ranks; a sharded model's are whole on
        rank 0 and nowhere else."""
        state = self.state() if self.average is None else self.average.state
        return state if self.shards is None else self.shards.gather_all(state)

    def is_evaluation_due(self) -> bool:
        """Whether the last step done ended an epoch after which the run is evaluated."""
        step, between = self.progress.step, self.config.eval_every * self.order.steps_per_epoch
        return step > 0 and (step % between == 0 or step == self.num_steps)

    def is_evaluated(self) -> bool:
        """Whether the weights as they are now were evaluated."""
        return self.progress.evaluated_step == self.progress.step

    def note_world(self) -> None:
        """Write the present world down, if the run went on in another one or with another environment so far."""
        self.progress.fingerprint = self.fingerprint.to_json()
        now = {"size": self.world.size, "environment": self.fingerprint.environment, "code": self.fingerprint.code}
        worlds = self.progress.worlds
        if not worlds or {**worlds[-1], **now} != worlds[-1]:
            worlds.append({"size": self.world.size, "from_step": self.progress.step, **now})
