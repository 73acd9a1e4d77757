"""Sections of the settings that all recipes share: `optim`, `checkpoint`, `record`, `loader` and so on."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from samebits.config.interval import INTERVAL_FORMS, parse_fraction, parse_interval, parse_steps

TRACKERS = ("tensorboard", "wandb", "mlflow")
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a validator of a text that `parse` reads, and raises ValueError for."""

    def check(text: str) -> str:
        parse(text)
        return text

    return check


IntervalText = Annotated[str, AfterValidator(_checked(parse_interval))]


class Settings(BaseModel):
    """A group of settings: frozen, without unknown keys, NaN or infinity. Defaults are validated too."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )


class OptimConfig(Settings):
    """Optimizer and learning rate schedule."""

    name: Literal["sgd", "adam", "adamw", "lamb", "muon"] = Field(
        default="sgd", description="Optimizer. muon trains hidden matrices; the rest is trained with adamw."
    )
    lr: float = Field(default=0.01, gt=0, description="Peak learning rate for the global batch.")
    lr_for_batch: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="Global batch that lr was chosen for. lr is multiplied by global_batch / lr_for_batch (linear "
        "scaling rule); null: lr is used as it is.",
    )
    momentum: Decay = Field(default=0.9, description="Momentum of sgd and muon.")
    nesterov: bool = Field(default=False, description="Use Nesterov momentum (sgd).")
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.999), description="Decay rates of the moment estimates (adam, adamw, lamb, muon)."
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="Weight decay. Except in sgd and adam it is decoupled from the gradient."
    )
    decay_norms_and_biases: bool = Field(
        default=True, description="Apply weight decay to parameters with one dimension too: norms and biases."
    )
    layer_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Factor of the learning rate from a block of the model to the one below, such as 0.75, for "
        "fine-tuning. null: all layers learn at lr.",
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Decay of an exponential moving average (EMA) of the weights, such as 0.999. The average is then "
        "evaluated and saved; null: no average.",
    )
    schedule: Literal["constant", "cosine", "warmup_cosine", "one_cycle", "multi_step"] = Field(
        default="constant",
        description="Learning rate schedule after the warmup. The cosine of warmup_cosine begins when the warmup ends.",
    )
    warmup_epochs: float = Field(
        default=0.0, ge=0, description="Epochs of linear warmup to lr, at most half of the run."
    )
    warmup_factor: Share | None = Field(
        default=None, description="Initial learning rate / lr in the warmup. null: one step's share of the warmup."
    )
    final_factor: Share = Field(default=0.0, description="Final learning rate / lr (cosine, warmup_cosine, one_cycle).")
    peak_at: Share = Field(default=0.3, description="Fraction of training at which lr is reached (one_cycle).")
    start_factor: Share = Field(default=0.04, description="Initial learning rate / lr (one_cycle).")
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(), description="Epochs at which lr is multiplied by gamma (multi_step)."
    )
    gamma: float = Field(default=0.1, gt=0, le=1, description="Factor of lr at each milestone (multi_step).")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Largest L2 norm of all gradients together; null: no clipping."
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "OptimConfig":
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum above 0; fix: Set nesterov=false, or momentum=0.9.")
        if self.schedule == "multi_step" and not self.milestones:
            raise ValueError("schedule multi_step needs milestones; fix: Set optim.milestones=[30, 60], for example.")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones must increase; fix: Sort them, and name each epoch once.")
        return self


class StopEarlyConfig(Settings):
    """When training ends before its last step because validations no longer improve."""

    patience: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Number of validations without an improvement after which training ends. null: never."
    )
    min_delta: float = Field(default=0.0, ge=0, description="Smallest change of the metric that is an improvement.")
    metric: str | None = Field(default=None, description="Metric of the validation. null: the one the recipe monitors.")
    better: Literal["max", "min"] = Field(
        default="max", description="Whether larger or smaller values of metric are better."
    )


class CheckpointConfig(Settings):
    """When checkpoints are written, and how many are kept."""

    every: IntervalText = Field(default="1 epoch", description=f"Interval between checkpoints: {INTERVAL_FORMS}.")
    keep: int = Field(default=3, ge=1, description="Number of newest checkpoints to keep, besides the best one.")
    keep_every: str | None = Field(
        default=None,
        description="Interval of checkpoints to keep for good, at which samebits verify can start: "
        '"1000 steps" or "1 epoch"; null: none.',
    )
    on_change: Literal["auto", "error", "warn"] = Field(
        default="auto",
        description="What a resume does if code, data, library versions or the processor changed since the checkpoint. "
        "auto: error in exact mode; in fast mode error for data, warn for the rest.",
    )

    @field_validator("keep_every")
    @classmethod
    def _is_a_number_of_steps(cls, value: str | None) -> str | None:
        if value is not None and parse_interval(value).seconds is not None:
            raise ValueError('must be like "1000 steps" or "1 epoch"; fix: Give a number of steps or epochs.')
        return value


class RecordConfig(Settings):
    """The record of a run's steps, by which others can verify it."""

    steps: bool = Field(
        default=True, description="Record loss, gradient norm and samples of each step: 72 bytes per step."
    )
    content: bool = Field(
        default=False, description="Record a digest of each step's sample values too. Slower: every sample is hashed."
    )


class LoaderConfig(Settings):
    """How samples are loaded. Does not change results."""

    num_workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = Field(
        default="auto",
        description="DataLoader workers per rank. 0: load in the training process; auto: one per free core, at most 8.",
    )
    prefetch: int = Field(default=2, ge=1, description="Batches that each worker loads in advance.")


class ClusterConfig(Settings):
    """How processes join and wait for each other."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="Communication backend. auto: nccl on GPUs, gloo on CPUs."
    )
    join_timeout_s: float = Field(default=300.0, gt=0, description="Longest wait for all processes to join, seconds.")
    timeout_s: float = Field(default=600.0, gt=0, description="Longest wait in a collective during training, seconds.")
    stop_timeout_s: float = Field(
        default=30.0, gt=0, description="Time to finish the step and save a checkpoint on a stop, seconds."
    )
    last_call_s: float = Field(
        default=5.0,
        gt=0,
        description="With --nodes MIN:MAX: how long to wait for further nodes once MIN have joined, seconds.",
    )
    node_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="With --nodes: a node without a heartbeat for this long counts as lost, seconds.",
    )
    recovery: Literal["auto", "restart", "in_step"] = Field(
        default="auto",
        description="After the loss of a process. restart: all restart from the last checkpoint; in_step: the others "
        "finish the step, and a new process joins them (exact mode, CPU); auto: in_step where possible, on one machine "
        "with --max-restarts.",
    )
    load_balancing: bool = Field(
        default=False,
        description="Give slow processes fewer micro-batches of a step (exact mode). Does not change results.",
    )


class WatchConfig(Settings):
    """Detection of hangs, diverged ranks and non-finite values."""

    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="On a loss or gradient that is not finite: stop, skip the step, or roll back to a checkpoint.",
    )
    hang_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        default=300.0,
        description="Stop the run, and name the stalled rank, when no rank makes progress for this long, seconds. "
        "null: never.",
    )
    replica_check_every: IntervalText | None = Field(
        default="1 epoch",
        description=f"Interval between checks that all ranks have equal weights: {INTERVAL_FORMS}; null: never.",
    )

    recheck: Annotated[str, AfterValidator(_checked(parse_fraction))] | None = Field(
        default=None,
        description="Fraction of the micro-batches that a second rank computes too, such as 1/50, to name a rank that "
        "computes wrong values. Adds about this fraction to the time of a step. null: none.",
    )


class ReportConfig(Settings):
    """Records of the training."""

    every_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Steps between training records; null: about 50 records per epoch."
    )
    tensorboard: bool = Field(default=True, description="Write TensorBoard files into the run folder.")
    peak_tflops: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Peak TFLOP/s of one device in this precision, for mfu in the records. null: that of known GPUs.",
    )
    profile: Annotated[str, AfterValidator(_checked(parse_steps))] | None = Field(
        default=None,
        description="Steps of rank 0 to profile with torch.profiler, such as 10:13; a trace and a table are written "
        "to profile/ in the run folder. null: none.",
    )
    trackers: tuple[str, ...] = Field(
        default=(),
        description=f"Experiment trackers that receive the records: {', '.join(TRACKERS)}, or Python files with a "
        "samebits.Tracker. They cannot stop or change training.",
    )
    project: str | None = Field(
        default=None, description="Project or experiment in the trackers. null: the name of the recipe."
    )

    @model_validator(mode="after")
    def _trackers_fit_together(self) -> "ReportConfig":
        for name in self.trackers:
            if name not in TRACKERS and not name.endswith(".py"):
                raise ValueError(
                    f"trackers has {name!r}; it must be one of {', '.join(TRACKERS)}, or a Python file; "
                    "fix: Correct the name."
                )
        names = [name.rpartition("/")[2] for name in self.trackers]
        if len(set(names)) < len(names):
            raise ValueError("trackers has a name twice; fix: Name each tracker once.")
        if "tensorboard" in self.trackers and not self.tensorboard:
            raise ValueError("trackers has tensorboard, and tensorboard=false; fix: Remove one of them.")
        return self
