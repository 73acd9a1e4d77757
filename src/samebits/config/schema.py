"""The settings that all recipes share. The settings of a recipe are a subclass of `RunConfig`.

Settings are typed and frozen, and unknown keys are refused. Only what a user chooses is a setting; values that follow
from the settings are computed later.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from samebits.config.combinations import check_load_balancing
from samebits.config.interval import Interval, parse_interval
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


class RunConfig(Settings):
    """All settings of a run. Recipes add `data` and `model`."""

    recipe: str = Field(description="What to train: the name of a recipe, or the path of a recipe file.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of all random numbers of the run.")
    epochs: int = Field(default=10, gt=0, le=10**9, description="Passes over the training set.")
    max_steps: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="Number of optimizer steps after which training ends, if the epochs have more. The learning rate "
        "schedule spans these steps. null: all epochs.",
    )
    global_batch: int = Field(default=64, gt=0, description="Samples per optimizer step, over all processes.")
    micro_batch: int = Field(
        default=32,
        gt=0,
        description="Samples per forward pass in training. It does not depend on the number of processes.",
    )
    eval_batch: int = Field(default=256, gt=0, description="Samples per forward pass in evaluation.")
    eval_every: Annotated[int, Field(gt=0)] | str = Field(
        default=1,
        description='Interval between evaluations: a number of epochs, or "500 steps". The last step is always '
        "followed by one.",
    )
    stop_early: StopEarlyConfig = Field(
        default=StopEarlyConfig(), description="End training when validations no longer improve."
    )
    mode: Literal["exact", "fast"] = Field(
        default="exact",
        description="exact: equal weights, bit for bit, at any number of processes; fast: equal up to rounding.",
    )
    batch_norm: Literal["micro", "sync"] = Field(
        default="micro",
        description="Samples that batch norm computes its statistics over. micro: each micro-batch; sync: the global "
        "batch (for small micro-batches; slower, and needs memory for all micro-batches of a process).",
    )
    parallel: Literal["ddp", "fsdp", "dp"] = Field(
        default="ddp",
        description="ddp: each process holds the whole model; fsdp: parameters, gradients and optimizer state are "
        "sharded: by whole tensors in mode=exact, by torch's fully_shard in mode=fast (docs/memory.md). dp: torch's "
        "DataParallel, for comparison only.",
    )
    activation_checkpointing: bool | tuple[str, ...] = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them: true for the innermost "
        "blocks, or a list of module name patterns. Results do not change.",
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        default="fp32",
        description="Precision of the model's computation. Weights, loss and optimizer stay in fp32; tf32: GPUs only.",
    )
    loss_scale: Literal["dynamic"] | Annotated[float, Field(ge=1, le=2.0**24)] = Field(
        default="dynamic",
        description="Loss scale in fp16, which keeps small gradients from underflowing: a power of two, or dynamic.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of each process. auto: cuda where there is a GPU, else cpu."
    )
    num_threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="CPU threads per process. Another number changes the last bits of the result.",
    )
    kernels: Literal["auto", "avx2", "portable"] = Field(
        default="auto",
        description="CPU kernels. auto: the fastest ones of each processor; avx2: those for AVX2, for runs on several "
        "kinds of x86-64 processors; portable: without AVX, slow. Another choice changes the last bits of the result.",
    )
    channels_last: bool = Field(
        default=True, description="Store images in channels-last memory format, which is faster."
    )
    compress: Literal["none", "bf16", "fp16"] = Field(
        default="none",
        description="Compression of gradients between processes. bf16, fp16: half the bytes, also in exact mode.",
    )
    compile: bool = Field(
        default=False,
        description="Train with torch.compile: slower first step, faster steps afterwards. Results differ in the last "
        "bits from an uncompiled run.",
    )
    optim: OptimConfig = Field(default=OptimConfig(), description="Optimizer and learning rate schedule.")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="When checkpoints are written, and how many are kept."
    )
    record: RecordConfig = Field(default=RecordConfig(), description="The record of the steps, for samebits verify.")
    loader: LoaderConfig = Field(default=LoaderConfig(), description="How samples are loaded.")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="How processes join and wait for each other.")
    watch: WatchConfig = Field(
        default=WatchConfig(), description="Detection of hangs, diverged ranks and non-finite values."
    )
    report: ReportConfig = Field(default=ReportConfig(), description="Records of the training.")

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
    def _precision_fits_together(self) -> RunConfig:
        if self.loss_scale != "dynamic":
            if self.precision != "fp16":
                raise ValueError(
                    f"loss_scale is for precision fp16, and precision is {self.precision}; fix: Set precision=fp16, or "
                    "loss_scale=dynamic."
                )
            if math.frexp(self.loss_scale)[0] != 0.5:
                below = 2.0 ** math.floor(math.log2(self.loss_scale))
                raise ValueError(
                    f"loss_scale is {self.loss_scale:g}, which is not a power of two and would round gradients; "
                    f"fix: Set loss_scale={below:g} or loss_scale={2 * below:g}."
                )
        return self

    @model_validator(mode="after")
    def _parallel_fits_together(self) -> RunConfig:
        if self.parallel == "dp" and self.mode == "exact":
            raise ValueError(
                "parallel=dp cannot be combined with mode=exact, because its order of summation depends on the number "
                "of GPUs; fix: Set mode=fast, or parallel=ddp."
            )
        if self.parallel == "fsdp" and self.mode == "exact":
            for name, is_there in (("watch.recheck", self.watch.recheck), ("record.content=true", self.record.content)):
                if is_there:
                    raise ValueError(f"{name} cannot be combined with parallel=fsdp; fix: Set parallel=ddp.")
        if self.parallel != "ddp" and self.batch_norm == "sync":
            raise ValueError(
                f"parallel={self.parallel} cannot be combined with batch_norm=sync; fix: Set batch_norm=micro."
            )
        if self.activation_checkpointing and self.batch_norm == "sync":
            raise ValueError(
                "activation_checkpointing cannot be combined with batch_norm=sync, because recomputation would run its "
                "all-reduce twice; fix: Set batch_norm=micro."
            )
        if self.activation_checkpointing and self.parallel == "dp":
            raise ValueError(
                "activation_checkpointing cannot be combined with parallel=dp, which copies the model; "
                "fix: Set parallel=ddp."
            )
        if self.compress != "none" and self.parallel != "ddp":
            raise ValueError(
                f"compress={self.compress} cannot be combined with parallel={self.parallel}; "
                "fix: Set compress=none, or parallel=ddp."
            )
        if self.compile and (self.parallel != "ddp" or self.activation_checkpointing):
            other = "activation_checkpointing" if self.activation_checkpointing else f"parallel={self.parallel}"
            raise ValueError(f"compile=true cannot be combined with {other}; fix: Set compile=false.")
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> RunConfig:
        if self.parallel == "fsdp" and self.optim.name in ("lamb", "muon"):
            raise ValueError(
                f"optim.name={self.optim.name} cannot be combined with parallel=fsdp, because it needs whole tensors; "
                "fix: Set optim.name=adamw, or parallel=ddp."
            )
        if self.parallel == "fsdp" and self.optim.layer_decay is not None:
            raise ValueError(
                "optim.layer_decay cannot be combined with parallel=fsdp; "
                "fix: Set optim.layer_decay=null, or parallel=ddp."
            )
        return self

    @model_validator(mode="after")
    def _speed_fits_together(self) -> RunConfig:
        if self.compile and self.batch_norm == "sync":
            raise ValueError(
                "compile=true cannot be combined with batch_norm=sync, whose micro-batches wait for each other inside "
                "the model; fix: Set compile=false, or batch_norm=micro."
            )
        return self

    @model_validator(mode="after")
    def _recheck_fits(self) -> RunConfig:
        if self.watch.recheck is not None and self.mode != "exact":
            raise ValueError(
                f"watch.recheck cannot be combined with mode={self.mode}, in which ranks may compute other bits; "
                "fix: Set mode=exact, or watch.recheck=null."
            )
        if self.watch.recheck is not None and self.batch_norm == "sync":
            raise ValueError(
                "watch.recheck cannot be combined with batch_norm=sync, in which no micro-batch can be computed "
                "without the others; fix: Set batch_norm=micro, or watch.recheck=null."
            )
        return self

    @model_validator(mode="after")
    def _batches_fit_together(self) -> RunConfig:
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch ({self.micro_batch}) is more than global_batch ({self.global_batch}); "
                f"fix: Set micro_batch={self.global_batch} or less."
            )
        return self

    @model_validator(mode="after")
    def _modes_fit(self) -> RunConfig:
        check_load_balancing(self)
        return self
