"""What an `ExactAccelerator` is given, and what it refuses."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.errors import CheckpointError, ConfigError
from samebits.integrations.accelerate_loaders import TrainingLoader
from samebits.integrations.refusal import Refusal, accumulation, refuse
from samebits.own_loop.exact import order_of
from samebits.own_loop.samples import LoaderSource
from samebits.own_loop.session import ExactLoop
from samebits.storage.run_folder import atomic_file

POSITION_FILE = "samebits.json"
_MAX_BYTES = 10_000
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


@dataclass(frozen=True)
class ExactSettings:
    """What a script chooses."""

    global_batch: int  #: Samples of a step, over all ranks.
    micro_batch: int | None = None  #: Samples of one forward pass. None: the DataLoader's batch_size.
    seed: int = 0  #: Seed of the order and of all random numbers in the loop.
    num_threads: int = 1  #: CPU threads of each process.
    hang_timeout_s: float | None = 300.0  #: How long no rank may make progress in training, seconds; None: forever.

    def order_of(self, source: LoaderSource) -> Order:
        """Return the order of the samples of a training DataLoader.

        Raises:
            ConfigError: A batch size is missing or invalid.
        """
        micro_batch = source.batch_size if self.micro_batch is None else self.micro_batch
        return order_of(
            len(source.samples), self.global_batch, micro_batch, self.seed, source.is_shuffled, source.drop_last
        )


@dataclass
class ExactPart:
    """The exact part of an accelerator."""

    settings: ExactSettings  #: What decides the result.
    world: World  #: The ranks.
    reads_ahead: bool = False  #: Whether a framework fetches several micro-batches before it runs them (Trainer).
    is_preparing_training: bool = False  #: Whether the next DataLoader is the one to train on.
    data: DataLoader[Any] | None = None  #: The script's DataLoader to train on.
    loader: TrainingLoader | None = None  #: What was made of it.
    loop: ExactLoop | None = None  #: The exact loop, once it exists.
    batches_per_step: int = 1  #: How many batches of the DataLoader's batch_size a step has.
    loss_factor: Tensor | None = None  #: What `backward` multiplies the loss by, (); None for 1.
    position: dict[str, Any] | None = None  #: The position that a checkpoint has.

    def choose_training(self, loaders: list[DataLoader[Any]]) -> DataLoader[Any] | None:
        """Return the DataLoader to train on among those that are prepared together; None if there is none.

        Raises:
            ConfigError: Several may be the one to train on.
        """
        if self.reads_ahead:
            return loaders[0] if self.is_preparing_training and loaders else None
        shuffled = [each for each in loaders if isinstance(each.sampler, RandomSampler)]
        if len(shuffled) + (self.data is not None) > 1:
            raise ConfigError(
                "a second DataLoader shuffles its samples",
                cause="One DataLoader is trained on: the one that shuffles, or the first one that is prepared.",
                fix="Prepare the one to train on first; set shuffle=False for those to evaluate on.",
            )
        return (shuffled or loaders)[0] if self.data is None and loaders else None

    def check_between_steps(self) -> None:
        """Check that a checkpoint made now is complete."""
        if self.loop is not None and self.loop.is_inside and not self.loop.has_acted:
            raise ConfigError(
                "save_state() is called within a step, before the optimizers have acted",
                cause="The gradients of the step's first micro-batches are in no file.",
                fix="Call it after optimizer.step(), under: if accelerator.sync_gradients",
            )

    def load_position(self, origin: object) -> None:
        """Continue at the position that was read from a checkpoint.

        Raises:
            CheckpointError: The position belongs to other data or batch sizes.
        """
        if self.loader is None or self.position is None:
            return
        try:
            self.loader.load_state_dict(self.position)
        except CheckpointError as error:
            fix = "Use the global_batch, batch_size, seed and data of the checkpoint."
            raise error.with_slots("the checkpoint is of another run", where=origin, fix=fix) from None


def check_supported(accelerator: Any) -> None:
    """Check how an accelerator is configured. Raises ConfigError if its training can't be exact."""
    kind = accelerator.distributed_type
    name = kind.value if kind not in _SUPPORTED else "a ParallelismConfig"
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    refuse(
        Refusal(kind not in _SUPPORTED or getattr(accelerator, "parallelism_config", None) is not None,
                f"the accelerator uses {name}",
                "It splits the model or sums gradients in an order that depends on the number of processes.",
                "Leave out its plugin, and run accelerate config without it.",
                ", ".join(each.value for each in _SUPPORTED)),
        Refusal(accelerator.mixed_precision == "fp8", "mixed_precision is fp8",
                "Scales of fp8 follow from the micro-batches that a process had before.",
                "Set mixed_precision=bf16.", "no, bf16, fp16"),
        accumulation(accelerator.gradient_accumulation_steps),
        Refusal(accelerator.split_batches, "split_batches is on",
                "global_batch sets the samples of a step, and the DataLoader's batch_size those of a forward pass.",
                "Leave out split_batches, and set batch_size to the samples of one forward pass."),
        Refusal(hook is not None and hook.value != "no", f"the gradients are compressed by {hook and hook.value}",
                "Its rounding depends on the number of processes.", "Leave out comm_hook."),
    )  # fmt: skip


def write_position(folder: Path, position: dict[str, Any]) -> None:
    """Write a position, plain values by name, beside a framework's checkpoint.

    Raises:
        CheckpointError: It cannot be written.
    """
    with atomic_file(folder / POSITION_FILE) as partial:
        partial.write_text(json.dumps(position), encoding="utf-8")


def read_position(folder: Path) -> dict[str, Any]:
    """Read the position beside a framework's checkpoint. Raises CheckpointError if there is none, or it is damaged."""
    path = folder / POSITION_FILE
    try:
        with path.open(encoding="utf-8") as file:
            position = json.loads(file.read(_MAX_BYTES))
        if not isinstance(position, dict):
            raise ValueError("it has no names")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} can't be read",
            cause=f"{getattr(error, 'strerror', None) or error}. The checkpoint is incomplete, or of another tool.",
            fix="Load a checkpoint that has this file.",
        ) from None
    return position
