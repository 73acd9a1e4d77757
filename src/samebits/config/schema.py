"""The settings that all recipes share, their sections, and what excludes what. The settings of a recipe are a
subclass of `RunConfig`.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from samebits.config.interval import INTERVAL_FORMS, Interval, parse_interval, parse_steps

# Marks of the settings: whether a setting changes the result, and what may differ because it does not.


class Mark(Enum):
    """What a setting is for: metadata of its field, `Annotated[int, Mark.RESULT]`.

    Every field of `RunConfig` has exactly one of the first four. That of a section holds for all settings in it.
    """

    RESULT = "determines the result, and stays as it is at a resume"
    EXECUTION = "determines how a run is executed, and may change at a resume"
    VALIDATION = "may change at a resume, unless the validations decide when the run ends (stop_early.patience)"
    MACHINE = "may change at a resume, and differ between the machines of a run"
    TRAINING = "has no effect on a trained model"


# Recipes, also those of users, give these names to settings of the section `data`. They are known by name, because a
# run folder must be read without importing its recipe: that would run code of a stranger.
DATA_MARKS = {
    "root": Mark.MACHINE,
    "eval_sets": Mark.VALIDATION,  # one setting per set below it
}


# Sections of the settings that all recipes share: `optim`, `checkpoint`, `record`, `loader` and so on.


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
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class OptimConfig(Settings):
    """Optimizer and learning rate schedule."""

    name: Literal["sgd", "adam", "adamw", "lamb", "muon"] = Field(
        default="sgd",
        description="Optimizer. muon trains hidden matrices; the rest is trained with adamw.",
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
        default=(0.9, 0.999),
        description="Decay rates of the moment estimates (adam, adamw, lamb, muon).",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay. Except in sgd and adam it is decoupled from the gradient.",
    )
    decay_norms_and_biases: bool = Field(
        default=True,
        description="Apply weight decay to parameters with one dimension too: norms and biases.",
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
        default=None,
        description="Initial learning rate / lr in the warmup. null: one step's share of the warmup.",
    )
    final_factor: Share = Field(
        default=0.0, description="Final learning rate / lr (cosine, warmup_cosine, one_cycle)."
    )
    peak_at: Share = Field(
        default=0.3, description="Fraction of training at which lr is reached (one_cycle)."
    )
    start_factor: Share = Field(default=0.04, description="Initial learning rate / lr (one_cycle).")
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(), description="Epochs at which lr is multiplied by gamma (multi_step)."
    )
    gamma: float = Field(
        default=0.1, gt=0, le=1, description="Factor of lr at each milestone (multi_step)."
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Largest L2 norm of all gradients together; null: no clipping."
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "OptimConfig":
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "nesterov needs momentum above 0; fix: Set nesterov=false, or momentum=0.9."
            )
        if self.schedule == "multi_step" and not self.milestones:
            raise ValueError(
                "schedule multi_step needs milestones; fix: Set optim.milestones=[30, 60], for example."
            )
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones must increase; fix: Sort them, and name each epoch once.")
        return self


class StopEarlyConfig(Settings):
    """When training ends before its last step because validations no longer improve."""

    patience: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Number of validations without an improvement after which training ends. null: never.",
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="Smallest change of the metric that is an improvement."
    )
    metric: str | None = Field(
        default=None, description="Metric of the validation. null: the one the recipe monitors."
    )
    better: Literal["auto", "max", "min"] = Field(
        default="auto",
        description="Whether larger or smaller values of metric are better. auto: as for the metric that the recipe "
        "monitors; for another one smaller ones if its name is that of a loss or an error, else larger ones.",
    )

    @field_validator("better")
    @classmethod
    def _is_of_a_metric(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("metric") is not None:
            return value
        if value == "min":
            raise ValueError("must be set with stop_early.metric; fix: Set stop_early.metric too.")
        return "auto"  # stored settings have max, once the default, which does not count without a metric


class CheckpointConfig(Settings):
    """When checkpoints are written, and how many are kept."""

    every: IntervalText = Field(
        default="1 epoch", description=f"Interval between checkpoints: {INTERVAL_FORMS}."
    )
    keep: int = Field(
        default=3, ge=1, description="Number of newest checkpoints to keep, besides the best one."
    )
    keep_every: str | None = Field(
        default=None,
        description="Interval of checkpoints to keep for good, at which samebits verify can start: "
        '"1000 steps" or "1 epoch"; null: none.',
    )
    on_change: Literal["auto", "error", "warn"] = Field(
        default="auto",
        description="What a resume does if code, data, library versions or the processor changed since the checkpoint. "
        "auto and error: refuse it; warn: resume, to a model that no other run can reproduce.",
    )

    @field_validator("keep_every")
    @classmethod
    def _is_a_number_of_steps(cls, value: str | None) -> str | None:
        if value is not None and parse_interval(value).seconds is not None:
            raise ValueError(
                'must be like "1000 steps" or "1 epoch"; fix: Give a number of steps or epochs.'
            )
        return value


class RecordConfig(Settings):
    """The record of a run's steps, by which others can verify it."""

    steps: bool = Field(
        default=True,
        description="Record loss, gradient norm and samples of each step: 72 bytes per step.",
    )
    content: bool = Field(
        default=False,
        description="Record a digest of each step's sample values too. Slower: every sample is hashed.",
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
    join_timeout_s: float = Field(
        default=300.0, gt=0, description="Longest wait for all processes to join, seconds."
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="Longest wait in a collective during training, seconds."
    )
    stop_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time to finish the step and save a checkpoint on a stop, seconds.",
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
        "finish the step, and a new process joins them (CPU); auto: in_step where possible, on one machine "
        "with --max-restarts.",
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


class ReportConfig(Settings):
    """Records of the training."""

    every_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Steps between training records; null: about 50 records per epoch.",
    )
    tensorboard: bool = Field(
        default=True, description="Write TensorBoard files into the run folder."
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
        default=None,
        description="Project or experiment in the trackers. null: the name of the recipe.",
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
            raise ValueError(
                "trackers has tensorboard, and tensorboard=false; fix: Remove one of them."
            )
        return self


# Settings that exclude each other, as one table.


class Exclusion(NamedTuple):
    """Settings that cannot be combined."""

    when: str  #: A condition: `name=value`, `name!=value`, or `name` for any value but null, false or an empty list.
    not_with: str  #: Another condition.
    do: str  #: How to resolve it.
    why: str = ""  #: The reason, as the end of the message.


# The first row that applies is reported.
EXCLUSIONS = (
    Exclusion("loss_scale!=dynamic", "precision!=fp16", "Set precision=fp16, or loss_scale=dynamic."),
    Exclusion("kernels=portable", "compile=true", "Set compile=false, or kernels=auto.",
              ", because compiled kernels join operations that each have to round"),
    Exclusion("kernels=portable", "precision=tf32", "Set precision=fp32, or kernels=auto."),
    Exclusion("activation_checkpointing", "batch_norm=sync", "Set batch_norm=micro.",
              ", because recomputation would run its all-reduce twice"),
    Exclusion("compile=true", "activation_checkpointing", "Set compile=false."),
    Exclusion("compile=true", "batch_norm=sync", "Set compile=false, or batch_norm=micro.",
              ", whose micro-batches wait for each other inside the model"),
)  # fmt: skip


def find_exclusion(config: Settings) -> str | None:
    """Return the message of the first exclusion that applies to the settings, with its fix; None if none does."""
    for row in EXCLUSIONS:
        first = first_met(config, row.when)
        second = first_met(config, row.not_with)
        if first and second:
            return f"{first} cannot be combined with {second}{row.why}; fix: {row.do}"
    return None


def first_met(config: Settings, *conditions: str) -> str:
    """Return the first condition, as in `Exclusion`, that is met, with the value: `compile=true`; or ""."""
    for condition in conditions:
        name, equals, wanted = condition.partition("=")
        is_negated = name.endswith("!")
        name = name.removesuffix("!")
        value: object = config
        for key in name.split("."):
            value = getattr(value, key)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not equals and value not in (None, False, ()):
            return name
        if equals and (text == wanted) != is_negated:
            return f"{name}={text}"
    return ""


# The settings that all recipes share. The settings of a recipe are a subclass of `RunConfig`.
#
# Settings are typed and frozen, and unknown keys are refused. Only what a user chooses is a setting; values that follow
# from the settings are computed later.


Count = Annotated[int, Field(gt=0)]
LossScale = Annotated[float, Field(ge=1, le=2.0**24)]


class RunConfig(Settings):
    """All settings of a run, each with its marks. Recipes add `data` and `model`.

    A section without a description has that of its class.
    """

    recipe: Annotated[str, Mark.RESULT] = Field(
        description="What to train: the name of a recipe, or the path of a recipe file."
    )
    seed: Annotated[int, Mark.RESULT] = Field(
        default=0, ge=0, lt=2**63, description="Seed of all random numbers of the run."
    )
    epochs: Annotated[int, Mark.RESULT, Mark.TRAINING] = Field(
        default=10, gt=0, le=10**9, description="Passes over the training set."
    )
    max_steps: Annotated[Count | None, Mark.RESULT, Mark.TRAINING] = Field(
        default=None,
        description="Number of optimizer steps after which training ends, if the epochs have more. The learning rate "
        "schedule spans these steps. null: all epochs.",
    )
    global_batch: Annotated[int, Mark.RESULT, Mark.TRAINING] = Field(
        default=64, gt=0, description="Samples per optimizer step, over all processes."
    )
    micro_batch: Annotated[int, Mark.RESULT] = Field(
        default=32,
        gt=0,
        description="Samples per forward pass in training. It does not depend on the number of processes.",
    )
    eval_batch: Annotated[int, Mark.VALIDATION] = Field(
        default=256, gt=0, description="Samples per forward pass in evaluation."
    )
    eval_every: Annotated[Count | str, Mark.VALIDATION, Mark.TRAINING] = Field(
        default=1,
        description='Interval between evaluations: a number of epochs, or "500 steps". The last step is always '
        "followed by one.",
    )
    stop_early: Annotated[StopEarlyConfig, Mark.RESULT, Mark.TRAINING] = Field(
        default=StopEarlyConfig(),
        description="Early stopping: end training when validations no longer improve.",
    )
    batch_norm: Annotated[Literal["micro", "sync"], Mark.RESULT] = Field(
        default="micro",
        description="Samples that batch norm computes its statistics over. micro: each micro-batch; sync: the global "
        "batch (for small micro-batches; slower, and needs memory for all micro-batches of a process).",
    )
    activation_checkpointing: Annotated[bool | tuple[str, ...], Mark.EXECUTION] = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them: true for the innermost "
        "blocks, or a list of module name patterns. Results do not change.",
    )
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], Mark.RESULT] = Field(
        default="fp32",
        description="Precision of the model's computation. Weights, loss and optimizer stay in fp32; tf32: GPUs only.",
    )
    loss_scale: Annotated[Literal["dynamic"] | LossScale, Mark.RESULT] = Field(
        default="dynamic",
        description="Loss scale in fp16, which keeps small gradients from underflowing: a power of two, or dynamic.",
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Mark.EXECUTION] = Field(
        default="auto",
        description="Device of each process. auto: cuda where there is a GPU, else cpu.",
    )
    num_threads: Annotated[int, Mark.RESULT] = Field(
        default=1,
        ge=1,
        le=1024,
        description="CPU threads per process. Another number changes the last bits of the result.",
    )
    kernels: Annotated[Literal["auto", "portable"], Mark.RESULT] = Field(
        default="auto",
        description="Arithmetic. auto: the fastest kernels of each processor; portable: one result on every "
        "processor, at several times the cost (docs/portable.md). Another choice changes the result.",
    )
    channels_last: Annotated[bool, Mark.RESULT] = Field(
        default=True, description="Store images in channels-last memory format, which is faster."
    )
    compile: Annotated[bool, Mark.RESULT] = Field(
        default=False,
        description="Train with torch.compile: slower first step, faster steps afterwards. Results differ in the last "
        "bits from an uncompiled run.",
    )
    optim: Annotated[OptimConfig, Mark.RESULT, Mark.TRAINING] = OptimConfig()
    checkpoint: Annotated[CheckpointConfig, Mark.EXECUTION, Mark.TRAINING] = CheckpointConfig()
    record: Annotated[RecordConfig, Mark.EXECUTION, Mark.TRAINING] = Field(
        default=RecordConfig(), description="The record of the steps, for samebits verify."
    )
    loader: Annotated[LoaderConfig, Mark.EXECUTION] = Field(
        default=LoaderConfig(), description="How samples are loaded."
    )
    cluster: Annotated[ClusterConfig, Mark.EXECUTION] = ClusterConfig()
    watch: Annotated[WatchConfig, Mark.EXECUTION] = WatchConfig()
    report: Annotated[ReportConfig, Mark.EXECUTION] = ReportConfig()

    def check_inputs(self) -> None:
        """Check that the files that the settings name exist. A recipe overrides it.

        The launcher calls it before it starts processes, so it must answer at once and must not import torch.

        Raises:
            DataError: A file or folder does not exist.
        """

    @field_validator("eval_every", mode="before")
    @classmethod
    def _number_of_epochs(cls, value: object) -> object:
        # The command line gives texts, and of the two types a text is the closer one.
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("eval_every")
    @classmethod
    def _is_an_interval(cls, value: int | str) -> int | str:
        with suppress(ValueError):
            if isinstance(value, int) or parse_interval(value).seconds is None:
                return value
        raise ValueError('must be a number of epochs, or like "500 steps"')

    @property
    def eval_interval(self) -> Interval:
        """The interval between evaluations."""
        return (
            Interval(epochs=self.eval_every)
            if isinstance(self.eval_every, int)
            else parse_interval(self.eval_every)
        )

    @property
    def peak_lr(self) -> float:
        """The peak learning rate for this global batch."""
        meant_for = self.optim.lr_for_batch
        return self.optim.lr if meant_for is None else self.optim.lr * self.global_batch / meant_for

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "RunConfig":
        if (message := find_exclusion(self)) is not None:
            raise ValueError(message)
        # The mantissa of every power of two is 0.5.
        if self.loss_scale != "dynamic" and math.frexp(self.loss_scale)[0] != 0.5:
            below = 2.0 ** math.floor(math.log2(self.loss_scale))
            raise ValueError(
                f"loss_scale is {self.loss_scale:g}, which is not a power of two and would round gradients; "
                f"fix: Set loss_scale={below:g} or loss_scale={2 * below:g}."
            )
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch ({self.micro_batch}) is more than global_batch ({self.global_batch}); "
                f"fix: Set micro_batch={self.global_batch} or less."
            )
        return self


def marks_of(name: str) -> frozenset[Mark]:
    """Return the marks of a setting, by its dotted name. One that only a recipe has determines the result."""
    section, _, inside = name.partition(".")
    if section == "data":
        return frozenset({DATA_MARKS.get(inside.partition(".")[0], Mark.RESULT)})
    field = RunConfig.model_fields.get(section)
    return frozenset(
        {Mark.RESULT}
        if field is None
        else (item for item in field.metadata if isinstance(item, Mark))
    )
