"""A Lightning strategy that trains to equal weights at any number of processes.

    trainer = L.Trainer(strategy=ExactStrategy(global_batch=64), devices=4, ...)

Lightning's loop sees one item of the training loader for each step. Within it the strategy runs the micro-batches of
this rank, each with Lightning's own closure:

    Lightning                        this strategy                       own_loop
    next(loader)                     StepLoader, first micro-batch       begin
    on_train_batch_start
    optimizer_step(closure)          for each micro-batch: closure()     training_step, backward: hooks sum gradients
                                       next micro-batch                  begin
                                     once: clipping, optimizer.step()    buffers and weights change
    schedulers, on_train_batch_end

So everything that Lightning counts or does for each batch is counted and done once a step, at any world size.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import MicroBatch
from samebits.data.seeding import seed_between, seed_forward
from samebits.errors import ConfigError
from samebits.frames import callers, is_user
from samebits.integrations.frameworks import Refusal, refuse
from samebits.integrations.lightning_data import EvalSteps, EvaluationBatches, StepLoader
from samebits.integrations.lightning_log import ExactResults, find, metrics_kept
from samebits.module.determinism import set_kernels
from samebits.own_loop.current import check_same_data, check_same_script, current_world, watch
from samebits.own_loop.exact import order_of
from samebits.own_loop.guard import script_line
from samebits.own_loop.optimizer import attach, check_modules, follow, one_sample, plain_step
from samebits.own_loop.samples import source_of, warn_of_seed
from samebits.own_loop.session import ExactLoop

# What a Lightning Trainer can be configured with that cannot be exact, refused by name before the first step.


GradientAccumulationScheduler = find("callbacks", "GradientAccumulationScheduler")
StochasticWeightAveraging = find("callbacks", "StochasticWeightAveraging")
PRECISIONS = (find("plugins.precision", "Precision"), find("plugins.precision", "MixedPrecision"))
# What Lightning uses if configure_optimizers returns nothing.
_MockOptimizer = find("core.optimizer", "_MockOptimizer")
is_param_in_hook_signature = find("utilities.signature_utils", "is_param_in_hook_signature")

# Options of DDPStrategy that are not about gradients.
OPTIONS = (
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "process_group_backend", "timeout", "start_method",
)  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of the strategy. LightningCLI also gives those that no user gave, with their defaults."""
    known = (find("strategies", "DDPStrategy"), DistributedDataParallel)
    defaults = {
        name: each.default
        for kind in known
        for name, each in inspect.signature(kind).parameters.items()
    }
    for name, value in options.items():
        if name not in OPTIONS and (name not in defaults or value != defaults[name]):
            raise ConfigError(
                f"{name} is not an option of ExactStrategy",
                allowed=", ".join(("global_batch", "micro_batch", "seed", "num_threads", *OPTIONS)),
                cause="There is no DistributedDataParallel, so its options have no effect.",
                fix=f"Leave out {name}.",
            )


def check_trainer(trainer: Any, strategy: Any) -> None:
    """Check what a Trainer was made with.

    Raises:
        ConfigError: A part of it depends on the number of processes, or on batches that are not steps.
    """
    callbacks = [type(each) for each in trainer.callbacks]
    plugin = strategy.precision_plugin
    has_schedule, has_swa = (
        any(issubclass(each, kind) for each in callbacks)
        for kind in (GradientAccumulationScheduler, StochasticWeightAveraging)
    )
    takes_iterator = is_param_in_hook_signature(
        strategy.lightning_module.training_step, "dataloader_iter", explicit=True
    )
    refuse(
        Refusal(trainer.accumulate_grad_batches != 1 or has_schedule,
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}",
                "A step has global_batch samples already, in as many micro-batches as it takes.",
                "Leave it out, and set ExactStrategy(global_batch=...) to the samples of one step.",
                "1, without a GradientAccumulationScheduler"),
        Refusal(has_swa, "StochasticWeightAveraging cannot be exact",
                "Its last epoch averages the statistics of batch norm over this process's batches.",
                "Use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging."),
        # Set by sync_batchnorm=True.
        Refusal(strategy._layer_sync is not None, "sync_batchnorm=True cannot be exact",
                "torch's SyncBatchNorm sums statistics in an order that depends on the number of processes.",
                "Leave it out: batch norm then uses each micro-batch's statistics."),
        Refusal(type(plugin) not in PRECISIONS, f"precision {plugin.precision!r} cannot be exact",
                "Gradients are summed in float32, which weights of other types do not have.",
                "Set Trainer(precision='bf16-mixed') or another of these.", "32-true, 16-mixed, bf16-mixed"),
        Refusal(takes_iterator, "training_step takes dataloader_iter",
                "It then takes batches itself, and the strategy cannot run a step's micro-batches.",
                "Take (batch, batch_idx)."),
    )  # fmt: skip


def loss_of(training_step: Callable[[], Any], module: Any) -> Any:
    """Return what training_step returns for a micro-batch.

    Raises:
        ConfigError: It returned None in automatic optimization, or batch norm had one sample.
    """
    try:
        result = training_step()
    except ValueError as error:
        raise (one_sample(error) or error) from None
    if result is None and module.automatic_optimization:
        raise ConfigError(
            "training_step() returned None",
            cause="Each micro-batch of a step is part of its mean gradient, on whichever rank it is.",
            fix="Return a loss for each: weight samples to leave out by zero; where all are left out, give 0.0 * loss.",
        )
    return result


DDPStrategy: Any = find("strategies", "DDPStrategy")
TrainerFn = find("trainer.states", "TrainerFn")
do_nothing_closure = find("core.optimizer", "do_nothing_closure")

TRAINING_STEP = 1  # parts of the keys of random numbers: after the transfer of a micro-batch,
AFTER_EVALUATION = 1 << 33  # and after validation


class ExactStrategy(DDPStrategy):
    """Trains to equal weights at any number of processes, and after a resume on another number.

    Args:
        global_batch: Samples of a step, over all processes.
        micro_batch: Samples of one forward pass. None: the DataLoader's batch_size.
        seed: Seed of the order and of all random numbers in training.
        num_threads: CPU threads of each process. Kernels split their sums by it, so it belongs to the result.
        hang_timeout_s: Name the stalled rank, and end, when no rank makes progress for this long, seconds; None: never.
        **options: Options of DDPStrategy that are not about gradients: start_method, timeout, process_group_backend,
            cluster_environment, checkpoint_io and the like.

    Raises:
        ConfigError: An option of DDP has no meaning here.
    """

    strategy_name = "exact"

    def __init__(
        self,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int = 0,
        num_threads: int = 1,
        hang_timeout_s: float | None = 300.0,
        **options: Any,
    ) -> None:
        check_options(options)
        super().__init__(**options)
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._seed = seed
        self._num_threads = num_threads
        self._hang_timeout_s = hang_timeout_s
        self._world: World | None = None
        self._loop: ExactLoop | None = None
        self._loader: StepLoader | None = None
        self._eval_steps: EvalSteps | None = None
        self._batch: Any = None  # the current micro-batch, on the device
        self._is_running = False
        self._line = ""  # of the script, where it has read the number of processes

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine. A script may divide its batch size by it."""
        self._note_reading()
        return int(super().num_processes)

    @property
    def world_size(self) -> int:
        """Number of processes, which `Trainer.world_size` returns."""
        self._note_reading()
        return int(super().world_size)

    def _note_reading(self) -> None:
        # the script itself, or behind a property of the Trainer
        near = islice(callers(sys._getframe(2)), 2)
        if any(is_user(each.f_code.co_filename) for each in near):
            self._line = self._line or script_line()

    # Set-up, in the order of Lightning's calls.

    def setup(self, trainer: Any) -> None:
        """Prepare the module, the optimizers and the loops for `fit`, `validate`, `test` or `predict`."""
        is_fit = trainer.state.fn == TrainerFn.FITTING
        self._trainer = trainer
        self._loader = None
        self._loop = None
        if is_fit:
            check_trainer(trainer, self)
            check_modules([self.lightning_module])
        self.accelerator.setup(trainer)
        # Training and evaluation have loaders of their own.
        trainer._accelerator_connector.use_distributed_sampler = (
            trainer.state.fn == TrainerFn.PREDICTING
        )
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        set_kernels(self._num_threads, self.root_device)
        self._world = current_world(self.root_device)
        settings = {
            "global_batch": self._global_batch,
            "micro_batch": self._micro_batch,
            "seed": self._seed,
        }
        check_same_script(self._world, settings)
        # The loops of the trainer merge what is logged, and skip the batches of other ranks.
        module = self.lightning_module
        self._eval_steps = EvalSteps(trainer, self.root_device)
        fit = trainer.fit_loop.epoch_loop
        fit._results = ExactResults(True, module, self._world)
        for loop in (fit.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results = ExactResults(False, module, self._world)
            self._eval_steps.install(loop)
        if is_fit:
            self.setup_optimizers(trainer)
            is_none = not self.optimizers or isinstance(self.optimizers[0], _MockOptimizer)
            refuse(
                Refusal(is_none, "configure_optimizers returned no optimizer", "", "Return one.")
            )
            self._loop = self._make_loop()
        else:
            collectives.broadcast_tensors(self._world, [*module.parameters(), *module.buffers()])
        self.setup_precision_plugin()  # wraps the optimizers again, with the class that they have now

    def _make_loop(self) -> ExactLoop:
        """Make the engine; rank 0's weights go to all ranks."""
        module = self.lightning_module
        scaler = getattr(self.precision_plugin, "scaler", None)
        trained = [(optimizer, plain_step(optimizer)) for optimizer in self.optimizers]
        loop = ExactLoop(
            [module], trained, self.world, seed=self._seed, check_finite=scaler is None
        )
        for number, optimizer in enumerate(self.optimizers):
            attach(optimizer, loop, number)
        watch(self.world, self._hang_timeout_s)
        if scaler is not None:
            follow(scaler, loop)
        if not module.automatic_optimization:
            for config in self.lr_scheduler_configs:
                follow(config.scheduler, loop)
        return loop

    def process_dataloader(self, dataloader: Any) -> Any:
        """Replace a DataLoader by one of equal content at any world size."""
        trainer = self._trainer
        if trainer.predicting:
            return dataloader
        source = source_of(dataloader)
        if trainer.training:
            check_same_data(self.world, source, self._seed)
            warn_of_seed(dataloader, self._seed)
            if self._micro_batch is None:
                refuse(Refusal(self._line,
                    f"micro_batch is not given, and {self._line} reads the number of processes; batch_size is "
                    f"{source.batch_size}",
                    "A batch size that is divided by it is another micro-batch, and so another model, at each number.",
                    "Give the micro-batch, equal at any number: ExactStrategy(micro_batch=..., ...)."))  # fmt: skip
            order = order_of(source, self._global_batch, self._micro_batch, self._seed)
            self._loader = StepLoader(
                source, order, self.world, lambda: self.loop, trainer.fit_loop
            )
            return self._loader
        assert self._eval_steps is not None
        return EvaluationBatches(source, self.world, self._seed, self._eval_steps)

    @property
    def world(self) -> World:
        """The ranks."""
        assert self._world is not None
        return self._world

    @property
    def loop(self) -> ExactLoop:
        """The engine."""
        assert self._loop is not None
        return self._loop

    # Training.

    def on_train_start(self) -> None:
        """Check the loaders, which Lightning has made by now."""
        num = len(self._trainer.fit_loop._combined_loader.flattened)
        refuse(Refusal(num != 1, f"there are {num} training dataloaders",
                       "How they are combined decides the samples of a step.",
                       "Combine the datasets into one, whose samples are tuples or dicts.", "1"))  # fmt: skip

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keep the step's first micro-batch, after Lightning has moved it to the device."""
        self._batch = batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's training_step: on the current micro-batch, or in manual optimization on all."""
        if self._is_running:
            step = super().training_step
            return loss_of(lambda: step(self._batch, *args[1:], **kwargs), self.lightning_module)
        if self.lightning_module.automatic_optimization:
            raise ConfigError(
                "optimizer_step() of the LightningModule has called the closure itself",
                cause="A step has several micro-batches, which optimizer.step(closure) runs.",
                fix="Call optimizer.step(closure=optimizer_closure).",
            )
        module_step = super().training_step
        result = self._run_micro_batches(lambda: module_step(self._batch, *args[1:], **kwargs))
        self._end_step()
        return result

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the step's micro-batches, then let the optimizer act once.

        Args:
            optimizer, model, **kwargs: As in Lightning.
            closure: In automatic optimization: training_step, zero_grad and backward on the current micro-batch.
        """
        if self.lightning_module.automatic_optimization:
            loss = self._run_micro_batches(closure)
            self.loop.seed_update()  # for hooks, such as on_before_optimizer_step
            result = super().optimizer_step(optimizer, lambda: loss, model, **kwargs)
            self._end_step()
            return result
        if self.loop.is_last:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with torch.enable_grad():
            result = closure()
        optimizer.step()  # only noted: the step has micro-batches to come
        return result

    def _run_micro_batches(self, work: Callable[[], Any]) -> Any:
        """Run all micro-batches of the current step; the last one stays open."""
        assert self._loader is not None
        loader = self._loader
        result = None
        loops = self._trainer.fit_loop.epoch_loop
        results: ExactResults = loops._results
        callbacks = [
            (each._on_before_step, each._on_after_step) for each in self._lightning_optimizers
        ]
        for number, micro_batch in enumerate(loader.step.micro_batches):
            if number:
                # What Lightning has done with the step's first micro-batch.
                batch = self.precision_plugin.convert_input(loader.begin_next())
                batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
                self._batch = self.batch_to_device(batch, dataloader_idx=0)
                # The user's hook of zero_grad counts steps too, as an average of the weights does.
                loops.automatic_optimization._on_before_zero_grad = lambda optimizer: None
            for wrapper, (before, after) in zip(self._lightning_optimizers, callbacks, strict=True):
                # They count steps.
                wrapper._on_before_step = before if self.loop.is_last else do_nothing_closure
                wrapper._on_after_step = after if self.loop.is_last else do_nothing_closure
            result = self._run_one(micro_batch, work, results)
        vars(loops.automatic_optimization).pop("_on_before_zero_grad", None)
        self._batch = None
        results.num_samples = loader.step.num_samples
        results.merge()
        return result

    def _run_one(
        self, micro_batch: MicroBatch, work: Callable[[], Any], results: ExactResults
    ) -> Any:
        is_padding = micro_batch.weight == 0.0
        # Hooks may have drawn random numbers since the start of the step's first micro-batch.
        seed_forward(micro_batch.forward_key, self.root_device, TRAINING_STEP)
        self._is_running = True
        try:
            with (
                results.of_batch(micro_batch.index, len(micro_batch), is_muted=is_padding),
                metrics_kept(self.lightning_module) if is_padding else nullcontext(),
            ):
                return work()
        finally:
            self._is_running = False

    def _end_step(self) -> None:
        assert self._loader is not None
        self.loop.finish()
        self._loader.end_step()

    def on_validation_end(self) -> None:
        """Seed the generators again: ranks have drawn different numbers in their batches."""
        if self._loop is not None:
            seed_between(self.root_device, self._seed, self._loop.step, AFTER_EVALUATION)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ranks; see DDPStrategy. The mean of equal values is that value, in every bit.

        Args:
            tensor: A tensor of any shape; other values are returned as they are.
            group: The process group; None: all ranks.
            reduce_op: mean, sum or a ReduceOp.
        """
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if (
            not isinstance(tensor, Tensor)
            or not is_mean
            or group is not None
            or self._world is None
        ):
            return super().reduce(tensor, group, reduce_op)
        if self._world.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self._world.size)]
        dist.all_gather(parts, tensor.contiguous())
        if all(torch.equal(part, parts[0]) for part in parts):
            return tensor
        return torch.stack(parts).double().mean(0).to(tensor.dtype)

    def teardown(self) -> None:
        """Leave the loop."""
        if self._loop is not None:
            self._loop.leave()
        super().teardown()
