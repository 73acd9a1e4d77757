"""Memory by part and FLOPs of a run, estimated without running it.

One forward and backward pass runs under torch's FakeTensorMode, which computes shapes and types but no values. Saved
tensors are counted as autograd saves them. The loss is left out; the gradient of the output stands in for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.flop_counter import FlopCounterMode

from samebits.bits import tensors_in
from samebits.config.schema import RunConfig
from samebits.data.division import even_shares, num_micro_batches
from samebits.data.seeding import seeded
from samebits.engine.parts import Parts
from samebits.errors import ConfigError
from samebits.module.activation_checkpointing import choose_parts
from samebits.module.flops import count_recurrent, shapes_alone
from samebits.module.precision import use_precision
from samebits.parallel.blocks import count, shard_blocks
from samebits.parallel.tree import are_siblings, partials, push

CPU = torch.device("cpu")
MOMENTS = {"adam": 2, "adamw": 2, "lamb": 2, "muon": 2}


@dataclass(frozen=True)
class Pass:
    """Cost of one micro-batch."""

    activations: int  #: Bytes saved for the backward pass, including the gradient of the output.
    #: Floating-point operations of the forward and backward pass (a multiplication and an addition are two).
    flops: int


@dataclass(frozen=True)
class Sizes:
    """Size of a model."""

    total: int  #: Number of parameters.
    trained: int  #: Number of parameters that are trained.
    buffers: int  #: Size of the buffers in bytes.
    block: int  #: Largest number of parameters that fsdp has gathered at one time.


def sizes_of(model: nn.Module) -> Sizes:
    """Count the parameters and buffers of a model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    blocks = [count(block) for _, block in shard_blocks(model)]
    total = count(model)
    return Sizes(
        total=total,
        trained=sum(parameter.numel() for parameter in trained),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        block=min(
            total, total - sum(blocks) + 2 * max(blocks, default=0)
        ),  # one in use, the next being gathered
    )


def pass_through(
    config: RunConfig, build: Callable[[], Parts], inputs: Any, num_samples: int
) -> tuple[Pass, Sizes]:
    """Run a micro-batch through a recipe's model without values.

    Args:
        build: Returns the recipe's parts.

    Raises:
        ConfigError: The model depends on values.
    """
    if config.precision == "tf32":  # the same memory as fp32
        config = config.model_copy(update={"precision": "fp32"})
    try:
        return _pass_through(config, build, inputs, num_samples)
    except DataDependentOutputException as error:
        raise ConfigError(
            f"this model cannot be planned, since it reads values of tensors: {error.func}",
            fix="Run samebits train and look at its memory use instead.",
        ) from error


def _pass_through(
    config: RunConfig, build: Callable[[], Parts], inputs: Any, num_samples: int
) -> tuple[Pass, Sizes]:
    with shapes_alone(), seeded(config.seed):
        model = build().model
        use_precision(model, config, CPU)
        batch = _repeated(inputs, num_samples)
        outputs: list[Tensor] = []
        recurrent = count_recurrent(model)
        with FlopCounterMode(display=False) as counter, _kept(model, config) as kept:
            outputs = [tensor for tensor in tensors_in(model(batch)) if tensor.requires_grad]
            recurrent_forward = sum(recurrent)
            forward = counter.get_total_flops() + recurrent_forward
            torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
        again = forward if config.activation_checkpointing else 0
        activations = kept() + sum(2 * tensor.nbytes for tensor in outputs)
        return Pass(
            activations, counter.get_total_flops() + 3 * recurrent_forward + again
        ), sizes_of(model)


@contextmanager
def _kept(model: nn.Module, config: RunConfig) -> Iterator[Callable[[], int]]:
    """Count the bytes that autograd saves; with activation checkpointing, the maximum at one time."""
    own = {id(tensor.untyped_storage()) for tensor in [*model.parameters(), *model.buffers()]}
    by_part: dict[str, dict[int, Any]] = {"": {}}
    now = [""]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            by_part[now[-1]][id(storage)] = (
                storage  # a reference, so that no other storage reuses its id
            )
        return tensor

    hooks = []
    for name, module in choose_parts(model, config.activation_checkpointing):
        by_part[name] = {}

        # A default argument: otherwise all hooks would have the last name of the loop.
        def enter(_: nn.Module, args: Any, name: str = name) -> None:
            for tensor in tensors_in(args):
                by_part[""][id(tensor.untyped_storage())] = tensor.untyped_storage()
            now.append(name)

        hooks.append(module.register_forward_pre_hook(enter))
        # None: any other result of a hook would replace the module's output.
        hooks.append(module.register_forward_hook(lambda *_: now.pop() and None))
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield lambda: _bytes(by_part.pop("")) + max(map(_bytes, by_part.values()), default=0)
    finally:
        for hook in hooks:
            hook.remove()


def _bytes(storages: dict[int, Any]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def memory(
    config: RunConfig, sizes: Sizes, activations: int, num_procs: int, parallel: str
) -> dict[str, int]:
    """Return the peak memory of the process that needs the most, by part, in bytes.

    Args:
        config: The settings; `parallel` is ignored.
        activations: Bytes per micro-batch.
    """
    is_sharded = parallel == "fsdp" and num_procs > 1
    share = num_procs if is_sharded else 1
    optim = config.optim
    moments = MOMENTS.get(optim.name, int(optim.momentum > 0))
    copies, num_receives = (
        (owner_copies(config, num_procs), 0) if is_sharded else bucket_copies(config, num_procs)
    )
    sent_bytes = 2 if _is_16bit(config) else 4
    extra_bytes = 4 * _is_16bit(config)  # the sum in fp32
    return {
        "weights": 4 * sizes.total // share,
        "gradients": (sent_bytes * copies + extra_bytes) * sizes.trained // share,
        "optimizer": 4 * moments * sizes.trained // share,
        "ema": (4 * sizes.total // share + sizes.buffers) if optim.ema is not None else 0,
        "buffers": 2 * sizes.buffers,  # the current ones, and those from before the step
        # A block's weights, its gradients, and the gradients being sent. A rank's share is taken as even.
        "communication": 3 * 4 * sizes.block
        if is_sharded
        else sent_bytes * sizes.trained * num_receives,
        "activations": activations * (num_held(config, num_procs) if not is_sharded else 1),
    }


def num_held(config: RunConfig, num_procs: int) -> int:
    """Return how many micro-batches a process holds at once: with synchronized batch norm, all of its own."""
    num_leaves = num_micro_batches(config.global_batch, config.micro_batch)
    return -(-num_leaves // num_procs) if config.batch_norm == "sync" else 1


def bucket_copies(config: RunConfig, num_procs: int) -> tuple[int, int]:
    """Return how many copies of the gradients rank 0 holds at once, and how many receive buffers it allocates."""
    num_leaves = num_micro_batches(config.global_batch, config.micro_batch)
    shares = even_shares(num_leaves, num_procs)
    stack: list[tuple[tuple[int, int], None]] = []
    most = 1
    in_tree = config.mode == "exact" or _is_16bit(config)  # 16-bit sums are in both modes
    for leaf in range(*shares[0]):
        joins = stack and (not in_tree or are_siblings(stack[-1][0], (leaf, leaf + 1), num_leaves))
        most = max(most, len(stack) + (not joins))
        push(stack, (leaf, leaf + 1), None, num_leaves, lambda left, right: None)
        if not in_tree:
            stack[:] = [((0, leaf + 1), None)]
    if config.batch_norm == "sync" and in_tree:
        most = max(
            most, -(-num_held(config, num_procs) // 2)
        )  # all are open at once, and two siblings share a copy
    num_receives = (
        len(partials(*share, num_leaves)) if in_tree else int(share[0] < share[1])
        for share in shares[1:]
    )
    return most, sum(num_receives)


def owner_copies(config: RunConfig, num_procs: int) -> int:
    """Return how many sums of its own gradients a rank of a sharded model holds at once, between two passes."""
    num_leaves = num_micro_batches(config.global_batch, config.micro_batch)
    return max(
        len(partials(0, min(done, num_leaves), num_leaves))
        for done in range(num_procs, num_leaves + num_procs, num_procs)
    )


def _is_16bit(config: RunConfig) -> bool:
    return config.compress in ("bf16", "fp16")


def _repeated(value: Any, num_samples: int) -> Any:
    def again(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = torch.empty((num_samples, *leaf.shape[1:]), dtype=leaf.dtype)
        return made.contiguous(memory_format=torch.channels_last) if made.dim() == 4 else made

    return torch.utils._pytree.tree_map(again, value)
