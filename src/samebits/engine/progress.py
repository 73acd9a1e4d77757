"""State of a run: its position, the flags and the result of a step, and the loss scale, which a step may change.

The loss scale keeps small gradients of fp16 from underflowing to zero (`loss_scale`). The constants of the dynamic
loss scale are those of torch.amp.GradScaler.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntFlag
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError
from samebits.version import __version__

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
# No infinity or NaN: a step's times are added to it, so it would stay for the rest of the run.
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Hash = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
INIT_SCALE = 2.0**16
MIN_SCALE = 1.0
GROWTH_INTERVAL = 2000


@dataclass
class Progress:
    """The position of a run. With weights and optimizer state, it is all that a checkpoint contains."""

    #: Number of optimizer steps done; epoch, sample order, random numbers and learning rate follow from it.
    step: Count = 0
    num_samples: Count = (
        0  #: Number of samples trained on, counted in each epoch, without those of skipped steps.
    )
    evaluated_step: Count = 0  #: `step` at the last validation.
    metrics: dict[str, float] = field(default_factory=dict)  #: The metrics of that validation.
    evaluations: Hash = ""  #: Hash of all validations so far (`provenance.record.add_evaluation`).
    best: dict[str, Any] | None = None  #: Step, metric and value of the best validation so far.
    stop_best: float | None = None  #: Best value so far by the rule of `stop_early`.
    num_stale: Count = 0  #: Number of validations since then.
    has_stopped_early: bool = False  #: Whether `stop_early` has ended the run.
    #: Steps that were not applied because their loss or gradient was not finite.
    skipped: list[int] = field(default_factory=list)
    num_overflows: Count = (
        0  #: Number of steps that were not applied because the scaled gradient overflowed fp16.
    )
    #: Factor of the loss before the backward pass.
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    scale_age: Count = 0  #: Number of steps since the dynamic loss scale changed.
    #: World sizes and environments of the run so far, each with its first step.
    worlds: list[dict[str, Any]] = field(default_factory=list)
    seconds: Seconds = 0.0  #: Training time so far, without validation and checkpoints.
    data_s: Seconds = 0.0  #: Part of it that rank 0 waited for samples, in seconds.
    train_size: Count | None = (
        None  #: Number of training samples; None in checkpoints that predate it.
    )
    #: See `Fingerprint`; empty in checkpoints that predate it.
    fingerprint: dict[str, dict[str, str]] = field(default_factory=dict)
    #: The link of the step record before the next step, 64 hex digits (`provenance/record.py`); empty if steps are
    #: not recorded.
    chain: Hash = ""

    def to_json(self) -> dict[str, Any]:
        """Return the progress as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any], path: Path) -> "Progress":
        """Read the result of `to_json`. `path` names the checkpoint in errors.

        Raises:
            CheckpointError: The checkpoint has entries of another version of Samebits, or was altered.
        """
        # Entries of a newer version are refused, not dropped: resuming without them could change the result.
        unknown = sorted(state.keys() - {entry.name for entry in fields(cls)})
        try:
            progress = TypeAdapter(cls).validate_python(state)
            if progress.best is not None:
                step = progress.best["step"]
                value = progress.best["value"]
                if not (isinstance(step, int) and isinstance(value, int | float)):
                    raise TypeError(f"best has step {step!r} and value {value!r}")
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            raise _not_progress(path, unknown, str(error).replace("\n", " ")) from None
        if unknown:
            raise _not_progress(path, unknown, "")
        return progress

    def check_position(self, step: int, num_steps: int, metric: str, path: Path) -> None:
        """Check that a run can resume from this progress.

        Raises:
            CheckpointError: The run has no such position, or the last validation lacks the metric.
        """
        if self.step != step or not self.evaluated_step <= step <= num_steps:
            given = (
                f"step {self.step:,} of {num_steps:,}, evaluated after step {self.evaluated_step:,}"
            )
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


class StepFlags(IntFlag):
    """What rank 0 has decided. All ranks read it from the same sum, so all branch the same way after the step.

    Attributes:
        STOP: A stop was requested; `samebits verify`: a step differed.
        COMPARE: The ranks compare their weights.
        JOIN: A new process waits to join the world.
    """

    STOP = 1
    COMPARE = 2
    JOIN = 4

    @classmethod
    def unpack(cls, value: float) -> "StepFlags":
        """Return the flags in a sum; none if it is not finite."""
        # float32 holds every whole number up to 2^24, so no flag is rounded away.
        return cls(int(value)) if 0 <= value < 1 << 24 else cls(0)


@dataclass(frozen=True)
class StepResult:
    """The result of one step, equal on all ranks."""

    loss: float  #: Mean over the step's samples, before the update.
    #: The loss's named terms; names are known on ranks that ran a micro-batch.
    terms: dict[str, float]
    norm: float  #: 2-norm of the gradient, before clipping.
    lr: float  #: Learning rate.
    is_finite: bool  #: Whether loss and gradient were finite. If not, the step changed nothing.
    is_overflow: bool  #: Whether they were not because of fp16's loss scale, which was reduced.
    flags: StepFlags  #: What rank 0 has decided.


def init_scale(config: RunConfig) -> float:
    """Return the initial loss scale; 1 without fp16."""
    if config.precision != "fp16":
        return 1.0
    return INIT_SCALE if config.loss_scale == "dynamic" else float(config.loss_scale)


def update_scale(
    progress: Progress, config: RunConfig, loss: Sequence[float], *, is_finite: bool
) -> bool:
    """Update the dynamic loss scale after a step: halve it after an overflow, double it after 2,000 steps without one.

    All ranks compute the same update, since they have the same sums.

    Returns:
        Whether to skip the step because of an overflow that a smaller scale can avoid. False if the loss itself is not
        finite, or if the scale is already the smallest.
    """
    if config.precision != "fp16" or config.loss_scale != "dynamic":
        return False
    if is_finite:
        progress.scale_age += 1
        if progress.scale_age == GROWTH_INTERVAL:
            progress.loss_scale = progress.loss_scale * 2
            progress.scale_age = 0
        return False
    if progress.loss_scale <= MIN_SCALE or not all(map(math.isfinite, loss)):
        return False
    # A power of two, so halving it rounds no gradient (ADR 16).
    progress.loss_scale = progress.loss_scale / 2
    progress.scale_age = 0
    progress.num_overflows += 1
    return True
