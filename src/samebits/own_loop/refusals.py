"""What a script can contain that cannot be exact, refused by name before the first step."""

from collections.abc import Sequence
from types import FrameType

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.errors import ConfigError


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Check that modules can be trained exactly."""
    if not modules:
        raise ConfigError("there is no model", fix="Give exact(model, ...).")
    for module in modules:
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ConfigError(
                f"the model is wrapped by {type(module).__name__}",
                cause="It sums gradients over ranks, in an order that depends on their number.",
                fix=f"Give the model itself: leave out {type(module).__name__}(model).",
            )
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"the model is a {type(module).__name__}",
                allowed="torch.nn.Module",
                fix="Give a module.",
            )
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                raise ConfigError(
                    f"layer {name or type(module).__name__} has sparse gradients",
                    cause="Gradients are summed as dense tensors, in an order that depends on no rank.",
                    fix="Set sparse=False, with an optimizer for dense gradients instead of SparseAdam.",
                )
            if isinstance(layer, nn.SyncBatchNorm):
                raise ConfigError(
                    f"layer {name or type(module).__name__} is torch's SyncBatchNorm",
                    cause="Its statistics are summed in an order that depends on the number of ranks.",
                    fix="Leave out convert_sync_batchnorm: batch norm then uses each micro-batch's statistics.",
                )
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise ConfigError(
                    f"{name} has no shape yet",
                    cause="A lazy module takes its shapes from the first input.",
                    fix="Call the model once on an example before exact().",
                )
    if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        raise ConfigError(
            "no parameter of the model requires a gradient",
            fix="Unfreeze some: requires_grad_(True).",
        )


def check_split(order: Order, world: World) -> None:
    """Check that a step has work for more than one rank.

    Raises:
        ConfigError: It is a single micro-batch, which all other ranks would only repeat.
    """
    if world.size > 1 and order.micro_batch >= min(order.global_batch, order.num_samples):
        raise ConfigError(
            f"a step is one micro-batch, so {world.size - 1} of {world.size} ranks would only repeat it",
            given=f"global_batch={order.global_batch}, micro_batch={order.micro_batch}, {order.num_samples} samples",
            cause="The script divides its batch size by the number of processes, or micro_batch is too large.",
            fix="Give the same global_batch at any number of processes, and a smaller micro_batch.",
        )


def check_schedule(follower: object, num_batches: int, steps_per_epoch: int) -> None:
    """Check that a scheduler that acts once a step was not made from the length of the DataLoader.

    Args:
        num_batches: Length of the DataLoader that `exact` was given.
    """
    if not isinstance(follower, LRScheduler) or num_batches == steps_per_epoch:
        return
    for each in (follower, *getattr(follower, "_schedulers", ())):
        for name in ("total_steps", "T_max", "total_iters", "T_0"):
            value = getattr(each, name, None)
            if isinstance(value, int) and value > 1:
                raise ConfigError(
                    f"{type(each).__name__} has a length and was made before exact(): {name}={value:,}",
                    given=f"the DataLoader has {num_batches:,} batches, and an epoch {steps_per_epoch:,} steps",
                    cause="It acts once a step, and the number of batches depends on the number of processes.",
                    fix="Make it after exact(), from len(loader), and give it to loader.per_step(scheduler).",
                )


def check_caller(frame: FrameType | None) -> None:
    """Check that a model is not called by a wrapper that was made after `exact`."""
    if frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        raise ConfigError(
            "the model of exact() is wrapped by DistributedDataParallel or DataParallel",
            cause="It sums gradients over ranks, in an order that depends on their number; exact() sums them already.",
            fix="Use the model that exact() returned, without a wrapper.",
        )


_WRAPPERS = ("torch/nn/parallel/distributed.py", "torch/nn/parallel/data_parallel.py")


def one_sample(error: ValueError) -> ConfigError | None:
    """Return the error for a micro-batch of one sample under batch norm, which torch refuses; None for other errors."""
    if "more than 1 value per channel" not in str(error):
        return None
    return ConfigError(
        "batch norm has a micro-batch of one sample, and no variance to divide by",
        given=str(error),
        cause="The last micro-batch of an epoch has what the batch sizes leave over.",
        fix="Set drop_last=True in the DataLoader, or another micro_batch, so that none has one sample.",
    )
