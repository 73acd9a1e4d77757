"""What a Lightning Trainer can be configured with that cannot be exact, refused by name before the first step."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from samebits.errors import ConfigError
from samebits.integrations.lightning_package import find
from samebits.integrations.refusal import Refusal, refuse
from samebits.own_loop.refusals import one_sample

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
    defaults = {name: each.default for kind in known for name, each in inspect.signature(kind).parameters.items()}
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
    callbacks, plugin = [type(each) for each in trainer.callbacks], strategy.precision_plugin
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


def check_optimizers(optimizers: list[Any]) -> None:
    """Check what configure_optimizers returned."""
    if not optimizers or isinstance(optimizers[0], _MockOptimizer):
        raise ConfigError("configure_optimizers returned no optimizer", fix="Return one.")


def check_loaders(combined: Any) -> None:
    """Check the loaders of training."""
    if len(combined.flattened) != 1:
        raise ConfigError(
            f"there are {len(combined.flattened)} training dataloaders",
            allowed="1",
            cause="How they are combined decides the samples of a step.",
            fix="Combine the datasets into one, whose samples are tuples or dicts.",
        )


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
