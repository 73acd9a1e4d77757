"""Every setting that all recipes share. A recipe's own settings are a subclass of `RunConfig`.

Settings are typed and frozen, and a key that is not a field is refused. Only what a person chooses is here; what
follows from it is computed later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lockstep.config.interval import INTERVAL_FORMS, parse_interval

Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]

# Former name of a shared setting -> its present name. A recipe lists its own in the `RENAMED` of its `Config`.
RENAMED: Mapping[str, str] = {"watch.drift_every": "watch.replica_check_every"}


class Settings(BaseModel):
    """A group of settings: frozen, unknown keys refused, defaults checked like given values, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )


class OptimConfig(Settings):
    """The optimizer and its learning rate over time."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="optimizer")
    lr: float = Field(default=0.01, gt=0, description="peak learning rate for the global batch")
    lr_for_batch: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="the global batch that lr is meant for: for another one lr is multiplied by global_batch / "
        "lr_for_batch (the linear rule); null: lr is for the global batch that there is",
    )
    momentum: Decay = Field(default=0.9, description="momentum of sgd")
    nesterov: bool = Field(default=False, description="Nesterov's form of momentum (sgd)")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), description="decay of the two averages (adam, adamw)")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay; decoupled from the gradient in adamw")
    decay_norms_and_biases: bool = Field(
        default=True, description="whether weight decay acts on what has one dimension too: norms and biases"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="decay of a moving average of the weights, such as 0.999, which is then what is evaluated and "
        "kept; it starts lower and grows; null: no average",
    )
    schedule: Literal["constant", "cosine", "one_cycle", "multi_step"] = Field(
        default="constant", description="learning rate over time, after the warmup"
    )
    warmup_epochs: float = Field(default=0.0, ge=0, description="epochs over which lr grows linearly to its peak")
    final_factor: Share = Field(default=0.0, description="lr at the end / peak lr (cosine, one_cycle)")
    peak_at: Share = Field(default=0.3, description="share of training after which lr peaks (one_cycle)")
    start_factor: Share = Field(default=0.04, description="lr at the start / peak lr (one_cycle)")
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(), description="epochs at which lr is multiplied by gamma (multi_step)"
    )
    gamma: float = Field(default=0.1, gt=0, le=1, description="factor at each milestone (multi_step)")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="largest norm of the whole gradient; null: no limit"
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> OptimConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum above 0")
        if self.schedule == "multi_step" and not self.milestones:
            raise ValueError("schedule multi_step needs milestones, such as [30, 60]")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones must grow, each given once")
        return self


class CheckpointConfig(Settings):
    """When checkpoints are written, and how many stay."""

    every: str = Field(default="1 epoch", description=f"time between checkpoints: {INTERVAL_FORMS}")
    keep: int = Field(default=3, ge=1, description="newest checkpoints that stay, beside the best one")
    on_change: Literal["auto", "error", "warn"] = Field(
        default="auto",
        description="what a resume does if code, data, library versions or the processor changed since the checkpoint. "
        "auto: error in exact mode; in fast mode error for data, warn for the rest",
    )

    @field_validator("every")
    @classmethod
    def _is_an_interval(cls, value: str) -> str:
        parse_interval(value)
        return value


class LoaderConfig(Settings):
    """How samples are read. Does not change results."""

    num_workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = Field(
        default="auto",
        description="reading processes for each rank; 0: the rank reads by itself; auto: by the cores that are free",
    )
    prefetch: int = Field(default=2, ge=1, description="batches that each worker reads ahead")


class ClusterConfig(Settings):
    """How processes find and wait for each other."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = Field(
        default="auto", description="what tensors travel by; auto: nccl on GPUs, gloo on CPUs"
    )
    join_timeout_s: float = Field(default=300.0, gt=0, description="longest wait for all processes to join, seconds")
    timeout_s: float = Field(
        default=600.0, gt=0, description="longest wait for other processes during training, seconds"
    )
    stop_timeout_s: float = Field(default=30.0, gt=0, description="time to finish the step and save on a stop, seconds")
    last_call_s: float = Field(
        default=5.0, gt=0, description="with --nodes MIN:MAX: wait for more than MIN machines, seconds"
    )
    node_timeout_s: float = Field(
        default=10.0, gt=0, description="with --nodes: a machine silent for so long is taken to be lost, seconds"
    )


class WatchConfig(Settings):
    """What happens when training goes wrong."""

    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="on a loss or gradient that is not finite: stop, skip the step, or go back to a checkpoint",
    )
    hang_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        default=300.0,
        description="end the run when no rank has made progress for so long, naming the one that holds the others up, "
        "seconds; null: never",
    )
    replica_check_every: str | None = Field(
        default="1 epoch",
        description=f"time between looks whether all ranks have the same weights: {INTERVAL_FORMS}; null: never",
    )

    @field_validator("replica_check_every")
    @classmethod
    def _is_an_interval(cls, value: str | None) -> str | None:
        if value is not None:
            parse_interval(value)
        return value


class ReportConfig(Settings):
    """What is written down while training."""

    every_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="steps between records; null: about 50 records an epoch"
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard files into the run folder")


class RunConfig(Settings):
    """All settings of a run. Recipes add `data` and `model`.

    Attributes:
        RENAMED: Former dotted name of a recipe's own setting -> its present name.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}

    recipe: str = Field(description="what to train: a recipe's name, or the path of a recipe file")
    seed: int = Field(default=0, ge=0, lt=2**63, description="all random numbers of the run follow from it")
    epochs: int = Field(default=10, gt=0, description="passes over the training samples")
    global_batch: int = Field(default=64, gt=0, description="samples of one optimizer step, over all processes")
    micro_batch: int = Field(default=32, gt=0, description="samples of one forward pass; at any number of processes")
    eval_batch: int = Field(default=256, gt=0, description="samples of one forward pass in evaluation")
    eval_every: int = Field(default=1, gt=0, description="epochs between evaluations; the last one is always evaluated")
    mode: Literal["exact", "fast"] = Field(
        default="exact", description="exact: the same bits at any number of processes; fast: equal up to rounding"
    )
    batch_norm: Literal["micro", "sync"] = Field(
        default="micro",
        description="what batch norm's statistics are taken over. micro: each micro-batch; sync: the global batch, for "
        "small micro-batches: it is slower, and a process holds all of its micro-batches in memory at once",
    )
    parallel: Literal["ddp", "fsdp", "dp"] = Field(
        default="ddp",
        description="what processes hold of the model. ddp: all of it, each; fsdp: its parameters, gradients and "
        "optimizer state are spread over them, for models that don't fit: needs mode=fast, see docs/memory.md; dp: one "
        "process uses all GPUs of this machine (torch's DataParallel), for comparison only",
    )
    activation_checkpointing: bool | tuple[str, ...] = Field(
        default=False,
        description="work parts of the model out once more in the backward pass, and keep less in memory until then: "
        "true for its innermost blocks, or a list of patterns of modules' names; changes no bit",
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        default="fp32",
        description="numbers that the model computes in; weights, loss and optimizer stay fp32. tf32: GPUs only",
    )
    loss_scale: Literal["dynamic"] | Annotated[float, Field(ge=1, le=2.0**24)] = Field(
        default="dynamic",
        description="what the loss is multiplied by in fp16, so that small gradients don't vanish: a power of two, or "
        "dynamic: as large as goes",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: a GPU for each process if there is one"
    )
    num_threads: int = Field(
        default=1, ge=1, le=1024, description="CPU threads of each process; a part of what decides the bits"
    )
    channels_last: bool = Field(
        default=True, description="lay out images with channels last in memory, which is faster"
    )
    compress: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        default="none",
        description="how gradients travel between processes. bf16, fp16: rounded, so half the bytes, also in exact; "
        "powersgd: as products of narrow matrices, for slow links, in mode=fast only",
    )
    powersgd_rank: int = Field(
        default=4, ge=1, le=256, description="columns of powersgd's matrices: more are nearer and longer"
    )
    compile: bool = Field(
        default=False,
        description="train the model by torch.compile: a later first step, then quicker ones; changes the last bits",
    )
    optim: OptimConfig = Field(default=OptimConfig(), description="the optimizer and its learning rate over time")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="when checkpoints are written, and how many stay"
    )
    loader: LoaderConfig = Field(default=LoaderConfig(), description="how samples are read")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="how processes find each other")
    watch: WatchConfig = Field(default=WatchConfig(), description="what happens when training goes wrong")
    report: ReportConfig = Field(default=ReportConfig(), description="what is written down")

    def check_inputs(self) -> None:
        """Check that the files that the settings name exist. A recipe overrides it.

        The launcher calls it before it starts processes, so it must answer at once and must not import torch.

        Raises:
            DataError: A file or folder does not exist.
        """

    @property
    def peak_lr(self) -> float:
        """The peak learning rate, for the global batch that there is."""
        meant_for = self.optim.lr_for_batch
        return self.optim.lr if meant_for is None else self.optim.lr * self.global_batch / meant_for

    @model_validator(mode="after")
    def _precision_fits_together(self) -> RunConfig:
        if self.loss_scale != "dynamic":
            if self.precision != "fp16":
                raise ValueError(f"loss_scale is for precision fp16, and precision is {self.precision}")
            if math.frexp(self.loss_scale)[0] != 0.5:
                below = 2.0 ** math.floor(math.log2(self.loss_scale))
                raise ValueError(
                    f"loss_scale must be a power of two, so that it rounds nothing: {below:g} or {2 * below:g}"
                )
        return self

    @model_validator(mode="after")
    def _parallel_fits_together(self) -> RunConfig:
        if self.parallel != "ddp" and self.mode == "exact":
            raise ValueError(f"parallel={self.parallel} adds up in another order at each world size: needs mode=fast")
        if self.parallel != "ddp" and self.batch_norm == "sync":
            raise ValueError(f"parallel={self.parallel} needs batch_norm=micro")
        if self.activation_checkpointing and self.batch_norm == "sync":
            raise ValueError("activation_checkpointing needs batch_norm=micro: sync's would meet twice")
        if self.activation_checkpointing and self.parallel == "dp":
            raise ValueError("activation_checkpointing can't be combined with parallel=dp, which copies the model")
        if self.compress != "none" and self.parallel != "ddp":
            raise ValueError(f"compress={self.compress} can't be combined with parallel={self.parallel}")
        if self.compile and (self.parallel != "ddp" or self.activation_checkpointing):
            other = "activation_checkpointing" if self.activation_checkpointing else f"parallel={self.parallel}"
            raise ValueError(f"compile=true can't be combined with {other}")
        return self

    @model_validator(mode="after")
    def _speed_fits_together(self) -> RunConfig:
        if self.compress == "powersgd" and self.mode == "exact":
            raise ValueError(
                "compress=powersgd keeps what each process has not sent yet, so its bits depend on the number of "
                "processes: set mode=fast, or compress=bf16, which is exact"
            )
        if self.compile and self.batch_norm == "sync":
            raise ValueError(
                "compile=true can't be combined with batch_norm=sync, in which micro-batches wait for each other "
                "inside of the model: compile=false, or batch_norm=micro"
            )
        return self

    @model_validator(mode="after")
    def _batches_fit_together(self) -> RunConfig:
        if self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch ({self.micro_batch}) is more than global_batch ({self.global_batch})")
        if self.optim.warmup_epochs > self.epochs:
            raise ValueError(
                f"optim.warmup_epochs ({self.optim.warmup_epochs:g}) is more than epochs ({self.epochs}): "
                "the learning rate would never reach its peak; optim.warmup_epochs=0 leaves the warm-up out"
            )
        return self
