"""Accelerate with equal bits at any number of processes: `ExactAccelerator` in place of `Accelerator`.

    accelerator = ExactAccelerator(global_batch=64, seed=0)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(...)

Accelerate makes the process group, places tensors, casts and saves. The exact loop (`own_loop`) decides which samples a
rank reads, sums gradients, and lets optimizers and schedulers act once a step; it replaces DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from samebits.cluster.world import World
from samebits.errors import CheckpointError, ConfigError

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ConfigError(
        "accelerate is not installed", cause=error, fix="Run: pip install 'samebits[accelerate]'."
    ) from None

from samebits.integrations.accelerate_loaders import (
    EvaluationLoader,
    TrainingLoader,
    gather_counted,
)
from samebits.integrations.frameworks import (
    MicroBatchSampler,
    Refusal,
    accumulation,
    read_ahead,
    refuse,
)
from samebits.module.determinism import set_kernels
from samebits.own_loop.current import current_world
from samebits.own_loop.exact import exact, order_of
from samebits.own_loop.loader import ExactLoader
from samebits.own_loop.optimizer import check_modules, plain_step
from samebits.own_loop.samples import source_of
from samebits.own_loop.session import ExactLoop
from samebits.storage.run_folder import atomic_file

# What an `ExactAccelerator` is given, and what it refuses.


POSITION_FILE = "samebits.json"
_MAX_BYTES = 10_000
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


@dataclass(frozen=True)
class ExactSettings:
    """What a script chooses."""

    global_batch: int  #: Samples of a step, over all ranks.
    micro_batch: int | None = (
        None  #: Samples of one forward pass. None: the DataLoader's batch_size.
    )
    seed: int = 0  #: Seed of the order and of all random numbers in the loop.
    num_threads: int = 1  #: CPU threads of each process.
    hang_timeout_s: float | None = (
        300.0  #: How long no rank may make progress in training, seconds; None: forever.
    )


@dataclass
class ExactPart:
    """The exact part of an accelerator."""

    settings: ExactSettings  #: What decides the result.
    world: World  #: The ranks.
    reads_ahead: bool = (
        False  #: Whether a framework fetches several micro-batches before it runs them (Trainer).
    )
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
            raise error.with_slots(
                "the checkpoint is of another run", where=origin, fix=fix
            ) from None


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


# The optimizers and schedulers that an `ExactAccelerator` prepares.


class ExactOptimizer(AcceleratedOptimizer):
    """An `AcceleratedOptimizer` that passes every call on: the exact loop decides when the optimizer acts."""

    def step(self, closure: Any = None) -> None:
        """Call `step` of the optimizer, through the GradScaler in fp16."""
        if self.scaler is None:
            self.optimizer.step(closure)
            return
        self._has_acted = False
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the GradScaler has left out the last step, because a gradient overflowed."""
        return (
            self.scaler is not None and self.gradient_state.sync_gradients and not self._has_acted
        )

    def watch(self) -> None:
        """Note from now on when the optimizer acts."""
        self._has_acted = True
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "_has_acted", True))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Call `zero_grad` of the optimizer."""
        self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)


class ExactScheduler(AcceleratedScheduler):
    """An `AcceleratedScheduler` that acts once a step."""

    exact: ExactPart  #: The exact part of the accelerator.

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler where the optimizers act, or at once between epochs."""
        loop = self.exact.loop
        if loop is None:
            self._advance(*args, **kwargs)
        else:
            loop.after_update(lambda: self._advance(*args, **kwargs))

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        # Accelerate counts batches of the DataLoader's batch_size over all processes.
        for _ in range(self.exact.batches_per_step):
            # As in Accelerate's own scheduler: no step after the last one of OneCycleLR.
            if self.scheduler._step_count <= getattr(
                self.scheduler, "total_steps", self.scheduler._step_count
            ):
                self.scheduler.step(*args, **kwargs)


class ExactAccelerator(Accelerator):
    """An `Accelerator` whose training gives equal weights at any number of processes.

    The first DataLoader given to `prepare` is the one to train on, or the one that shuffles.

    Args:
        *args: Arguments of `Accelerator`.
        global_batch: Samples of a step, over all processes.
        micro_batch: Samples of one forward pass. None: the batch_size of the DataLoader to train on.
        seed: Seed of the order and of all random numbers in the loop.
        num_threads: CPU threads of each process. Kernels split their sums by it, so it belongs to the result.
        hang_timeout_s: Name the stalled rank, and end, when no rank makes progress for this long, seconds; None: never.
        **kwargs: Arguments of `Accelerator`.

    Attributes:
        exact_part: What is exact, for frameworks that use this accelerator.

    Raises:
        ConfigError: The configuration can't be exact, such as FSDP or DeepSpeed.
    """

    def __init__(
        self,
        *args: Any,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int = 0,
        num_threads: int = 1,
        hang_timeout_s: float | None = 300.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._begin_exact(
            ExactSettings(global_batch, micro_batch, seed, num_threads, hang_timeout_s)
        )

    @classmethod
    def adopt(cls, accelerator: Any, settings: ExactSettings) -> Any:
        """Make an accelerator that has prepared nothing exact, for a framework that fetches micro-batches ahead."""
        # A new class for the same object, since the framework that made it has references to it.
        accelerator.__class__ = cls
        accelerator._begin_exact(settings)
        accelerator.exact_part.reads_ahead = True
        return accelerator

    def _begin_exact(self, settings: ExactSettings) -> None:
        check_supported(self)
        set_kernels(settings.num_threads, self.device)
        world = current_world(self.device)
        self.exact_part = ExactPart(settings, world)
        if self.num_processes != world.size:
            raise ConfigError(
                f"Accelerate takes this process for one of {self.num_processes}, and it is one of {world.size}",
                cause="Without a GPU, Accelerate joins the processes of a launcher only with cpu=True.",
                fix="Give ExactAccelerator(cpu=True, ...), or start by: accelerate launch --cpu.",
            )
        self.register_load_state_pre_hook(self._read_position)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, DataLoaders and schedulers; see `Accelerator.prepare`."""
        training = self.exact_part.choose_training(
            [each for each in args if isinstance(each, DataLoader)]
        )
        prepared = (
            args
            if training is None
            else [self._prepare_training(each) if each is training else each for each in args]
        )
        return super().prepare(*prepared, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Place and cast a model, without DistributedDataParallel.

        Args:
            model, device_placement: The model, and whether to move it to the device; None: as the accelerator does.
            evaluation_mode: Accepted, without effect: no model is wrapped.
        """
        if any(parameter.requires_grad for parameter in model.parameters()):
            check_modules([model])
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer: `step` acts in the last micro-batch of a step."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            plain_step(optimizer)  # refuses some
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if not isinstance(prepared, ExactOptimizer):
            # A new class for the same object, which Accelerate has in its list of optimizers.
            prepared.__class__ = ExactOptimizer
            prepared.watch()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler: `step` acts where the optimizers act.

        As in Accelerate, it advances once for each batch of the DataLoader's batch_size that a step has.
        """
        prepared = super().prepare_scheduler(scheduler)
        prepared.__class__ = ExactScheduler
        prepared.exact = self.exact_part
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare a DataLoader to evaluate on; `prepare` takes the one to train on.

        Args:
            data_loader, device_placement: The DataLoader, and whether to move batches to the device; see
                `prepare_model`.
            slice_fn_for_dispatch: For iterable datasets; see `Accelerator.prepare_data_loader`.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False) or isinstance(
            data_loader.dataset, IterableDataset
        ):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared = EvaluationLoader(
            source_of(data_loader), self.exact_part.world, self._placement(device_placement)
        )
        # `save_state` and `free_memory` go through this list.
        self._dataloaders.append(prepared)
        return prepared

    @contextlib.contextmanager
    def preparing_training(self) -> Iterator[None]:
        """Take the DataLoader that is prepared in this block as the one to train on."""
        self.exact_part.is_preparing_training = True
        self.exact_part.data = None
        try:
            yield
        finally:
            self.exact_part.is_preparing_training = False

    def start_loop(self) -> ExactLoop:
        """Make the exact loop of what was prepared, on all ranks."""
        return self._start().loop

    def _prepare_training(self, data: DataLoader[Any]) -> Any:
        source = source_of(data)
        part = self.exact_part
        chosen = part.settings
        order = order_of(source, chosen.global_batch, chosen.micro_batch, chosen.seed)
        part.data = data
        part.batches_per_step = -(-order.global_batch // source.batch_size)
        if part.reads_ahead:
            loader = read_ahead(data, source, MicroBatchSampler(order, part.world))
            loader._is_accelerate_prepared = True  # super().prepare() then keeps it
            return loader
        part.loader = TrainingLoader(source, order, self._start, self._placement(None))
        self._dataloaders.append(part.loader)
        return part.loader

    def _placement(self, device_placement: bool | None) -> torch.device | None:
        return (
            self.device
            if (self.device_placement if device_placement is None else device_placement)
            else None
        )

    def _start(self) -> ExactLoader:
        settings = self.exact_part.settings
        data = self.exact_part.data
        # What `prepare` has been given so far, in one call or several.
        if data is None or not self._models or not self._optimizers:
            raise ConfigError(
                "training has started before everything was prepared",
                given=f"{len(self._models)} models, {len(self._optimizers)} optimizers",
                fix="Give model, optimizer and DataLoader to accelerator.prepare() before the loop.",
            )
        models = list(dict.fromkeys(self._models))
        *_, loader = exact(
            models,
            [each.optimizer for each in self._optimizers],
            data,
            global_batch=settings.global_batch,
            micro_batch=settings.micro_batch,
            seed=settings.seed,
            per_step=[] if self.scaler is None else [self.scaler],
            num_threads=settings.num_threads,
            hang_timeout_s=settings.hang_timeout_s,
        )
        self.exact_part.loop = loader.loop
        return loader

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run a backward pass of the mean loss, of shape (), of a micro-batch; see `Accelerator.backward`.

        Raises:
            ConfigError: It is called outside of the loop over the DataLoader to train on.
        """
        if self.exact_part.loop is None or not self.exact_part.loop.is_inside:
            raise ConfigError(
                "backward() is called outside of the loop over the training DataLoader",
                cause="The DataLoader that shuffles, or the first prepared one, is trained on, others evaluated on.",
                fix="Iterate over the DataLoader that prepare() returned, and prepare the one to train on first.",
            )
        factor = self.exact_part.loss_factor
        super().backward(loss if factor is None else loss * factor.to(loss.dtype), **kwargs)

    def _do_sync(self) -> None:
        """Leave `sync_gradients` as the loader has set it: `accumulate` does not count passes."""

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Do nothing: all ranks run equally many micro-batches."""
        return contextlib.nullcontext()

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the DataLoader, whose position `load_state` has set; `num_batches` counts steps."""
        if isinstance(dataloader, TrainingLoader):
            dataloader.check_skip(num_batches)
            return dataloader
        return super().skip_first_batches(dataloader, num_batches)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of all processes, each sample's once; batches of different sizes are allowed.

        Tensors, nested or not, have a row for each sample, (N, ...). Objects come as a list.
        """
        active = self.gradient_state.active_dataloader
        if not isinstance(active, TrainingLoader | EvaluationLoader):
            return super().gather_for_metrics(input_data, use_gather_object)
        return gather_counted(self, input_data, active, as_objects=use_gather_object)

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, and the position."""
        self.exact_part.data = self.exact_part.loader = self.exact_part.loop = None
        return super().free_memory(*objects)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save all states, and the position in the data; see `Accelerator.save_state`.

        Args:
            output_dir, safe_serialization, **kwargs: See `Accelerator.save_state`.

        Raises:
            ConfigError: It is called within a step.
        """
        self.exact_part.check_between_steps()
        folder = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()  # the position is written last: a folder with it is complete
        if self.is_main_process and self.exact_part.loader is not None:
            write_position(Path(folder), self.exact_part.loader.state_dict())
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load all states, also those of another number of processes; see `Accelerator.load_state`.

        Args:
            input_dir, load_kwargs, **kwargs: See `Accelerator.load_state`.

        Raises:
            CheckpointError: The folder is incomplete, or its position belongs to other data or batch sizes.
        """
        super().load_state(input_dir, load_kwargs, **kwargs)
        self.exact_part.load_position(input_dir)

    def _read_position(self, models: list[nn.Module], input_dir: str) -> None:
        # Accelerate calls this before it loads anything.
        self.exact_part.position = (
            read_position(Path(input_dir)) if self.exact_part.loader is not None else None
        )
