"""The Trainer of transformers with equal bits at any number of processes: `ExactTrainer` in place of `Trainer`.

    trainer = ExactTrainer(model=model, args=args, train_dataset=data, global_batch=64)

The Trainer fetches the micro-batches of a step, runs them, clips, updates and logs. Its number of accumulated
batches is set to this rank's micro-batches, so its steps are those of the exact loop at any number of processes.
"""

import contextlib
import copy
import functools
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samebits.data.order import MicroBatch, Step
from samebits.errors import CheckpointError, ConfigError

try:
    import transformers
    from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
except ImportError as error:
    raise ConfigError(
        "transformers is not installed",
        cause=error,
        fix="Run: pip install 'samebits[transformers]'.",
    ) from None

from samebits.integrations.accelerate import (
    ExactAccelerator,
    ExactSettings,
    read_position,
    write_position,
)
from samebits.integrations.frameworks import (
    MicroBatchSampler,
    Refusal,
    StepLosses,
    accumulation,
    refuse,
)
from samebits.own_loop.current import check_equal_state
from samebits.own_loop.loader import check_content, content_of
from samebits.own_loop.session import ExactLoop

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object  # a mixin: the Trainer is another base of the class that uses it


# Arguments of the Trainer that exact training refuses, and weights that it has to convert.


_STRATEGIES = ("random", "sequential")
_CONFIG = "config.json"


def check_arguments(args: Any) -> None:
    """Check TrainingArguments. Raises ConfigError if training with them can't be exact."""
    strategy = getattr(args, "train_sampling_strategy", "random")
    refuse(
        accumulation(args.gradient_accumulation_steps),
        Refusal(args.n_gpu > 1, f"one process uses {args.n_gpu} GPUs by DataParallel",
                "It splits each micro-batch by the number of GPUs.",
                f"Start one process for each GPU: torchrun --nproc-per-node {args.n_gpu}."),
        Refusal(args.auto_find_batch_size, "auto_find_batch_size is on",
                "The size of a micro-batch would depend on the memory of the machine.",
                "Leave it out, and set per_device_train_batch_size."),
        Refusal(not args.average_tokens_across_devices, "average_tokens_across_devices is off",
                "Each process would divide its loss by its own number of tokens.", "Leave it out."),
        Refusal(args.data_seed is not None and args.data_seed != args.seed,
                f"data_seed is {args.data_seed}, and seed is {args.seed}",
                "One seed decides the order and all random numbers.", "Leave out data_seed."),
        Refusal(args.ignore_data_skip, "ignore_data_skip is on",
                "A resumed run would train on the first samples of the epoch again.",
                "Leave it out: skipping reads no samples."),
        Refusal(strategy not in _STRATEGIES, f"train_sampling_strategy is {strategy}",
                "It groups samples by the batch size of all processes.", "Leave it out.", ", ".join(_STRATEGIES)),
        *(Refusal(getattr(args, name, None), f"{name} is on",
                  "It sums gradients in an order that depends on the number of processes.", f"Leave out {name}.")
          for name in ("fsdp", "deepspeed")),
    )  # fmt: skip


def load_converted(model: nn.Module, checkpoint: Path) -> bool:
    """Load the weights of a model of transformers, and return whether it is one, and was loaded.

    `save_pretrained` writes some models under the names of their first release. The Trainer of transformers 5.23 does
    not convert them back, and leaves out what it does not find.

    Raises:
        CheckpointError: The checkpoint lacks weights of the model.
    """
    if not isinstance(model, PreTrainedModel) or not (checkpoint / _CONFIG).is_file():
        return False
    loaded, info = type(model).from_pretrained(
        checkpoint, config=model.config, output_loading_info=True, local_files_only=True
    )
    if info["missing_keys"]:
        raise CheckpointError(
            f"the checkpoint lacks {len(info['missing_keys'])} tensors of the model",
            given=", ".join(sorted(info["missing_keys"]))[:300],
            where=checkpoint,
            fix="Resume with the model that was trained.",
        )
    model.load_state_dict(loaded.state_dict())
    return True


_STATE = "trainer_state.json"


class ExactTrainerMixin(_Base):
    """Makes a `Trainer` exact: `class MyTrainer(ExactTrainerMixin, Seq2SeqTrainer)`.

    `per_device_train_batch_size` is the size of a micro-batch, the samples of one forward pass. `global_step`,
    `max_steps`, the schedule, logs, evaluations and checkpoints count steps of `global_batch` samples.

    Args:
        *args: Arguments of the Trainer.
        global_batch: Samples of a step, over all processes.
        hang_timeout_s: Name the stalled rank, and end, when no rank makes progress for this long, seconds; None: never.
        **kwargs: Arguments of the Trainer.

    Raises:
        ConfigError: The arguments can't be exact, such as FSDP or DeepSpeed.
    """

    accelerator: Any
    _sampler: MicroBatchSampler
    _planned: Iterator[Step]
    _step: Step

    def __init__(
        self, *args: Any, global_batch: int, hang_timeout_s: float | None = 300.0, **kwargs: Any
    ) -> None:
        self._global_batch = global_batch
        self._hang_timeout_s = hang_timeout_s
        self._loop: ExactLoop | None = None
        self._fetched: deque[tuple[Step, MicroBatch]] = deque()
        self._micro_batch: MicroBatch | None = None
        self._first_inputs: Any = None  # of a step whose first micro-batch is repeated
        self._losses = StepLosses()
        super().__init__(*args, **kwargs)
        # The first one, so that the user's callbacks see the epoch that it sets.
        self.callback_handler.callbacks.insert(0, _Epoch(self))

    # Set-up.

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and make it exact."""
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        settings = ExactSettings(
            self._global_batch, seed=self.args.seed, hang_timeout_s=self._hang_timeout_s
        )
        self.accelerator = ExactAccelerator.adopt(self.accelerator, settings)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def get_train_dataloader(self) -> Any:
        """Return a DataLoader of this rank's micro-batches."""
        with self.accelerator.preparing_training():
            loader = super().get_train_dataloader()
        if not isinstance(loader.batch_sampler, MicroBatchSampler):
            raise ConfigError(
                "get_train_dataloader() returned a DataLoader that accelerator.prepare() did not make",
                fix="Return self.accelerator.prepare(DataLoader(...)), or leave get_train_dataloader() as it is.",
            )
        self._sampler = loader.batch_sampler
        return loader

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of samples of a step."""
        return self._global_batch

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Count steps, of which each accumulates as many batches as this rank has micro-batches."""
        args.gradient_accumulation_steps = self._sampler.num_rounds
        return super().set_initial_training_values(args, dataloader)

    # Whether training ends or fails, the loop is left.
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self.args.gradient_accumulation_steps = 1
            if self._loop is not None:
                self._loop.leave()

    # From here on the model and the optimizer exist that the loop works on.
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model, loader = super()._prepare_for_training(*args, **kwargs)
        self._loop = self.accelerator.start_loop()
        return model, loader

    # The position of a checkpoint is checked before the Trainer uses it.
    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        checkpoint: Any,
        trial: Any,
    ) -> Any:
        if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, _STATE)):
            fix = "Use its global_batch, per_device_train_batch_size, seed and data, or train without resuming."
            there = read_position(Path(checkpoint))
            check_content(
                there, self._sampler.order, "the checkpoint is of another run", fix, checkpoint
            )
        self._losses.clear()
        return super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, checkpoint, trial
        )

    # The step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> Any:
        """Fetch the micro-batches that this rank runs in a step; return them and the items of the step over all ranks.

        Args:
            epoch_iterator, num_batches, device: Yields so many micro-batches with their positions; device of the count.
        """
        self._fetched.clear()
        return super().get_batch_samples(self._untagged(epoch_iterator), num_batches, device)

    def _untagged(self, tagged: Iterator[Any]) -> Iterator[Any]:
        for position, batch in tagged:
            self._fetched.append(self._sampler.find(position))
            yield batch

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the items of a step over all ranks, without repeated micro-batches; in evaluation those of a batch."""
        if not self.args.average_tokens_across_devices:
            return super()._get_num_items_in_batch(batch_samples, device)
        counted = [
            batch if micro_batch.weight > 0.0 else _without_items(batch)
            for batch, (_, micro_batch) in zip(batch_samples, self._fetched, strict=True)
        ]
        return super()._get_num_items_in_batch(counted, device)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a micro-batch, forward and backward; return its loss, of shape ().

        Args:
            model, inputs: The model and the micro-batch.
            num_items_in_batch: Items, such as tokens, of the whole step; None if the loss is a mean over samples.
        """
        assert self._loop is not None
        step, micro_batch = self._fetched[0]
        if micro_batch is step.micro_batches[0]:
            self._step = self._loop.repeat.extended(next(self._planned))
            is_more = len(self._step.micro_batches) > len(step.micro_batches)
            self._first_inputs = copy.deepcopy(inputs) if is_more else None
        self._fetched.popleft()
        self._micro_batch = micro_batch
        loss = self._run(model, inputs, micro_batch, num_items_in_batch)
        if not self._fetched and self._first_inputs is not None:
            # The repetition of the first one is not among those that the Trainer has fetched for the step.
            again = self._step.micro_batches[-1]
            self._run(model, self._first_inputs, again, num_items_in_batch)
        if self._loop.is_last:
            self._loop.seed_update()  # for callbacks, such as on_pre_optimizer_step
        return loss

    def _run(
        self, model: nn.Module, inputs: Any, micro_batch: MicroBatch, num_items_in_batch: Any
    ) -> Tensor:
        """`training_step` of a micro-batch of the current step, also of a repeated one."""
        assert self._loop is not None
        step = self._step
        self._loop.begin(step, micro_batch, inputs)
        self.current_gradient_accumulation_steps = 1
        share: Any = micro_batch.weight
        factor = None
        with self._without_world_size():
            # With the items of this micro-batch, the loss is a mean over them, also of models that ignore the number.
            if num_items_in_batch is not None and self.loss_is_scaled_for_ga is not False:
                num_all = num_items_in_batch
                num_items_in_batch = super()._get_num_items_in_batch([inputs], self.args.device)
                share = num_items_in_batch.double() / num_all.double()
                # The loop multiplies by the share of the samples; this makes it the share of the items. Of a repeated
                # one too, whose gradient is compared with its owner's.
                own = num_items_in_batch * step.num_samples
                total = num_all * len(micro_batch)
                factor = own.double() / total.double()
            self.accelerator.exact_part.loss_factor = factor
            loss = super().training_step(model, inputs, num_items_in_batch)
        if micro_batch.weight > 0.0:
            self._losses.add(loss * share)
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch. Its loss is the mean over its own items."""
        with self._without_world_size():
            return super().prediction_step(*args, **kwargs)

    @contextlib.contextmanager
    def _without_world_size(self) -> Iterator[None]:
        """Keep the Trainer from counting items of other ranks, and from multiplying losses by the number of ranks."""
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = True

    # Logs and checkpoints.

    # The Trainer would log the mean over ranks, whose last bits depend on their number.
    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            tr_loss = self._losses.take(self.accelerator.exact_part.world)
            self._tr_loss.zero_()
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    # No further micro-batch follows that would end the last step.
    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._loop is not None
        self._loop.finish()
        self._tr_loss = self._losses.take(self.accelerator.exact_part.world)
        return super()._finalize_training(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count the operations of a micro-batch; none if it is a repeated one."""
        return int(super().floating_point_ops(inputs)) if self._is_counted else 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        # A collective call: also for a repeated micro-batch, whose tokens do not count.
        if not self._is_counted:
            inputs = {
                name: value[:0] if isinstance(value, Tensor) and value.dim() else value
                for name, value in inputs.items()
            }
        super()._track_num_input_tokens(inputs)

    @property
    def _is_counted(self) -> bool:
        return self._micro_batch is None or self._micro_batch.weight > 0.0

    # The Trainer does not convert weights that were saved under older names: see `load_converted`.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not load_converted(self.model if model is None else model, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not load_converted(self.model, Path(self.state.best_model_checkpoint)):
            super()._load_best_model()

    # The position in the order of samples is saved beside the Trainer's own files.
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = (
                Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            )
            write_position(
                folder, {"step": self.state.global_step, **content_of(self._sampler.order)}
            )


class ExactTrainer(ExactTrainerMixin, transformers.Trainer):
    """A `Trainer` whose training gives equal weights at any number of processes; see `ExactTrainerMixin`."""


class _Epoch(TrainerCallback):
    """Compares the ranks before an epoch, plans its repetitions, and sets the epoch of logs: the Trainer counts this
    rank's micro-batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        check_equal_state(trainer._loop, trainer.accelerator.exact_part.world)
        trainer._planned = trainer._loop.repeat.repeated(iter(lambda: trainer._fetched[0][0], None))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step / self._trainer._sampler.steps_per_epoch


def _without_items(batch: Any) -> Any:
    """Return a batch whose labels do not count."""
    names = ("labels", "shift_labels")
    return {
        name: torch.full_like(value, -100) if name in names and isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
