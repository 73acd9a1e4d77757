"""`samebits.exact`: equal bits at any world size, in a training loop that a script has already."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from samebits.data.division import PADDED
from samebits.data.order import Order
from samebits.errors import ConfigError
from samebits.module.determinism import set_kernels
from samebits.own_loop.current import (
    check_same_data,
    check_same_order,
    check_same_script,
    current_world,
    watch,
)
from samebits.own_loop.ending import report_errors, watch_end
from samebits.own_loop.loader import ExactLoader
from samebits.own_loop.optimizer import (
    attach,
    attach_module,
    check_modules,
    check_schedule,
    check_split,
    follow,
    plain_step,
)
from samebits.own_loop.samples import LoaderSource, source_of, warn_of_seed
from samebits.own_loop.session import ExactLoop

ModelT = TypeVar("ModelT", bound=nn.Module | Sequence[nn.Module])
OptimizerT = TypeVar("OptimizerT", bound=Optimizer | Sequence[Optimizer])


def exact(
    model: ModelT,
    optimizer: OptimizerT,
    data: Any,
    *,
    global_batch: int,
    micro_batch: int | None = None,
    seed: int = 0,
    per_step: Sequence[Any] = (),
    num_threads: int = 1,
    hang_timeout_s: float | None = 300.0,
) -> tuple[ModelT, OptimizerT, ExactLoader]:
    """Make a training loop exact: equal weights at any number of processes, and after a resume on another number.

    The loop stays as it is. Its body runs for each micro-batch of this rank; `optimizer.step()` acts in the last one of
    a step, with the gradient of the mean over the global batch. All ranks call this function together.

    Args:
        model: The model or models, on this rank's device and not wrapped by DistributedDataParallel. Rank 0's weights
            go to all ranks.
        optimizer: The optimizer or optimizers of the model. They act together.
        data: A DataLoader. Its dataset, collate_fn, workers, shuffle and drop_last are taken over; a DistributedSampler
            is replaced.
        global_batch: Samples of a step, over all ranks.
        micro_batch: Samples of one forward pass. None: the DataLoader's batch_size.
        seed: Seed of the order and of all random numbers in the loop.
        per_step: What acts once a step beside the optimizer: schedulers that the loop steps after each batch, an
            AveragedModel, a GradScaler. A scheduler that is stepped after each epoch may be among them.
        num_threads: CPU threads of each process. Kernels split their sums by it, so it belongs to the result.
        hang_timeout_s: Name the stalled rank, and end, when no rank makes progress in the loop for this long, seconds.
            None: never.

    Returns:
        The model and the optimizer, the same objects, and the loader to iterate over.

    Raises:
        ConfigError: Something can't be exact: the sampler, the optimizer, a layer, or a batch size.
        LaunchError: The processes cannot join each other.
        TrainError: The ranks run different scripts.
    """
    report_errors()
    modules = [model] if isinstance(model, nn.Module) else list(model)
    optimizers: list[Optimizer] = (
        [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    )
    check_modules(modules)
    source = source_of(data)
    order = order_of(source, global_batch, micro_batch, seed)
    steps = [(each, plain_step(each)) for each in optimizers]
    device = next(parameter.device for module in modules for parameter in module.parameters())
    set_kernels(num_threads, device)
    world = current_world(device)
    settings = {
        "global_batch": global_batch,
        "micro_batch": order.micro_batch,
        "seed": seed,
        "num_threads": num_threads,
    }
    check_split(order, world)
    for follower in per_step:
        check_schedule(follower, len(data), order.steps_per_epoch)
    check_same_script(world, settings)
    check_same_data(world, source, seed)
    if world.is_main:
        warn_of_seed(data, seed)
    loop = ExactLoop(modules, steps, world, seed=seed)
    check_same_order(world, loop)
    if loop.observer is not None:
        loop.observer.settings = settings
    for number, each in enumerate(optimizers):
        attach(each, loop, number)
    for module in modules:
        attach_module(module, loop)
    for follower in per_step:
        follow(follower, loop)
    watch(world, hang_timeout_s)
    loader = ExactLoader(source, order, loop, world, source.num_workers)
    watch_end(loader)
    return model, optimizer, loader


def order_of(source: LoaderSource, global_batch: int, micro_batch: int | None, seed: int) -> Order:
    """Return the order of the samples of an exact loop. `micro_batch`: None: the DataLoader's batch_size.

    Raises:
        ConfigError: A batch size is missing or out of range.
    """
    size = source.batch_size if micro_batch is None else micro_batch
    num_samples = len(source.samples)
    for name, value in (("global_batch", global_batch), ("micro_batch", size)):
        if not isinstance(value, int) or value < 1:
            number = int(value) if str(value).isdecimal() else 0
            raise ConfigError(
                f"{name} is {value!r}",
                allowed="an integer of at least 1",
                fix=f"Give a number: {name}={number or 64}.",
            )
    if source.drop_last and num_samples < global_batch:
        raise ConfigError(
            f"no step: drop_last leaves out all {num_samples} samples",
            given=f"global_batch={global_batch}",
            fix="Set a smaller global_batch, or drop_last=False.",
        )
    return Order(
        num_samples,
        global_batch,
        size,
        seed,
        is_shuffled=source.is_shuffled,
        drop_last=source.drop_last,
        division=PADDED,
    )
