"""The settings that all recipes share. The settings of a recipe are a subclass of `RunConfig`.

Settings are typed and frozen, and unknown keys are refused. Only what a user chooses is a setting; values that follow
from the settings are computed later.
"""

import math
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from samebits.config.combinations import find_exclusion
from samebits.config.interval import Interval, parse_interval
from samebits.config.marks import DATA_MARKS, Mark
from samebits.config.sections import (
    CheckpointConfig,
    ClusterConfig,
    LoaderConfig,
    OptimConfig,
    RecordConfig,
    ReportConfig,
    Settings,
    StopEarlyConfig,
    WatchConfig,
)

Count = Annotated[int, Field(gt=0)]
LossScale = Annotated[float, Field(ge=1, le=2.0**24)]


class RunConfig(Settings):
    """All settings of a run, each with its marks. Recipes add `data` and `model`."""

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
        default=StopEarlyConfig(), description="End training when validations no longer improve."
    )
    mode: Annotated[Literal["exact", "fast"], Mark.RESULT] = Field(
        default="exact",
        description="exact: equal weights, bit for bit, at any number of processes; fast: equal up to rounding.",
    )
    batch_norm: Annotated[Literal["micro", "sync"], Mark.RESULT] = Field(
        default="micro",
        description="Samples that batch norm computes its statistics over. micro: each micro-batch; sync: the global "
        "batch (for small micro-batches; slower, and needs memory for all micro-batches of a process).",
    )
    parallel: Annotated[Literal["ddp", "fsdp"], Mark.EXECUTION] = Field(
        default="ddp",
        description="ddp: each process holds the whole model; fsdp: parameters, gradients and optimizer state are "
        "sharded by whole tensors (docs/memory.md).",
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
        default="auto", description="Device of each process. auto: cuda where there is a GPU, else cpu."
    )
    num_threads: Annotated[int, Mark.RESULT] = Field(
        default=1,
        ge=1,
        le=1024,
        description="CPU threads per process. Another number changes the last bits of the result.",
    )
    kernels: Annotated[Literal["auto", "avx2", "portable"], Mark.RESULT] = Field(
        default="auto",
        description="Arithmetic. auto: the fastest kernels of each processor; avx2: those for AVX2, for runs on "
        "several kinds of Intel processors; portable: one result on every processor, at several times the cost "
        "(docs/portable.md). Another choice changes the result.",
    )
    channels_last: Annotated[bool, Mark.RESULT] = Field(
        default=True, description="Store images in channels-last memory format, which is faster."
    )
    compress: Annotated[Literal["none", "bf16", "fp16"], Mark.RESULT] = Field(
        default="none",
        description="Compression of gradients between processes. bf16, fp16: half the bytes, also in exact mode.",
    )
    compile: Annotated[bool, Mark.RESULT] = Field(
        default=False,
        description="Train with torch.compile: slower first step, faster steps afterwards. Results differ in the last "
        "bits from an uncompiled run.",
    )
    optim: Annotated[OptimConfig, Mark.RESULT, Mark.TRAINING] = Field(
        default=OptimConfig(), description="Optimizer and learning rate schedule."
    )
    checkpoint: Annotated[CheckpointConfig, Mark.EXECUTION, Mark.TRAINING] = Field(
        default=CheckpointConfig(), description="When checkpoints are written, and how many are kept."
    )
    record: Annotated[RecordConfig, Mark.EXECUTION, Mark.TRAINING] = Field(
        default=RecordConfig(), description="The record of the steps, for samebits verify."
    )
    loader: Annotated[LoaderConfig, Mark.EXECUTION] = Field(
        default=LoaderConfig(), description="How samples are loaded."
    )
    cluster: Annotated[ClusterConfig, Mark.EXECUTION] = Field(
        default=ClusterConfig(), description="How processes join and wait for each other."
    )
    watch: Annotated[WatchConfig, Mark.EXECUTION] = Field(
        default=WatchConfig(), description="Detection of hangs, diverged ranks and non-finite values."
    )
    report: Annotated[ReportConfig, Mark.EXECUTION] = Field(
        default=ReportConfig(), description="Records of the training."
    )

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
        return Interval(epochs=self.eval_every) if isinstance(self.eval_every, int) else parse_interval(self.eval_every)

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
    return frozenset({Mark.RESULT} if field is None else (item for item in field.metadata if isinstance(item, Mark)))
