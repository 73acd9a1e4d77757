"""Checks of a recipe's model before its first use, so that a fault is named here and not raised deep inside torch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from samebits.data.division import smallest_micro_batch, two_or_more
from samebits.data.seeding import seeded
from samebits.errors import ConfigError
from samebits.storage.tensor_file import TYPES

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig


def check_model(model: object) -> None:
    """Check that a model can be trained, evaluated and saved."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the recipe's model is a {type(model).__name__}, not a torch.nn.Module",
            fix="Return Parts(model=..., ...).",
        )
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise ConfigError(
                f"{name} of the recipe's model has no shape yet",
                cause="A lazy module, such as LazyLinear, takes its shapes from the first input.",
                fix="Give the sizes (nn.Linear(64, 10)), or call the model once on an example in build.",
            )
        if value.is_meta:
            raise ConfigError(
                f"{name} of the recipe's model has no values: it is on the meta device",
                fix="Build the model on the CPU.",
            )
    for name, entry in model.state_dict().items():
        if not isinstance(entry, Tensor):
            raise ConfigError(
                f"{name} in the model's state_dict is a {type(entry).__name__}, which can't be saved",
                cause="A module has get_extra_state.",
                fix="Store it as a buffer: register_buffer(NAME, tensor).",
            )
        if entry.dtype not in TYPES:
            raise ConfigError(
                f"{name} of the recipe's model is {entry.dtype}, which can't be saved",
                allowed=", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES),
                fix="Convert it, or exclude it from checkpoints: register_buffer(..., persistent=False).",
            )


def check_trainable(model: nn.Module) -> None:
    """Check that a model has trainable parameters, all of them float32."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not trained:
        raise ConfigError(
            "no parameter of the recipe's model requires a gradient, so there is nothing to train",
            given=f"{len(list(model.parameters())):,} parameters, 0 of them trainable",
            fix="Freeze fewer layers, or give the model parameters.",
        )
    for name, value in trained:
        if value.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {value.dtype}: only float32 parameters can be trained",
                fix="Build the model in float32 (model.float()); precision=bf16 or fp16 computes in 16 bits.",
            )


def check_batches(
    config: RunConfig,
    model: nn.Module,
    num_samples: int,
    input_shape: tuple[int, ...] | None = None,
) -> None:
    """Check that no micro-batch (with batch_norm=sync, no step) has a single sample if batch norm needs two.

    Batch norm over one sample has no variance if a feature map has one value. Without this check, an epoch could fail
    at its last step.

    Args:
        input_shape: Shape of a sample's input. None: not known, so only BatchNorm1d counts as needing two.
    """
    is_sync = config.batch_norm == "sync"
    most = config.global_batch if is_sync else config.micro_batch
    if smallest_micro_batch(num_samples, config.global_batch, most) > 1 or not _needs_two(
        model, input_shape
    ):
        return
    last = num_samples % config.global_batch or config.global_batch
    raise ConfigError(
        f"batch norm can't work with a {'step' if is_sync else 'micro-batch'} of one sample",
        given=f"{num_samples:,} samples, global_batch={config.global_batch}, micro_batch={config.micro_batch}: "
        f"an epoch's last step has {last}",
        fix=two_or_more(num_samples, config.global_batch, config.micro_batch),
    )


def _needs_two(model: nn.Module, input_shape: tuple[int, ...] | None) -> bool:
    # A batch norm in evaluation mode computes no statistics.
    norms = [
        module for module in model.modules() if isinstance(module, _BatchNorm) and module.training
    ]
    if input_shape is None or not norms:
        return any(isinstance(module, nn.BatchNorm1d) for module in norms)
    try:
        # Portable arithmetic has no form for shapes alone: torch would end the process by SIGABRT at a convolution.
        # A module can hold tensors that are neither parameters nor buffers, and stay real.
        with (
            seeded(0),
            _disable_current_modes(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            # With these in the memo, deepcopy never touches a value.
            shapes = {
                id(tensor): mode.from_tensor(tensor)
                for tensor in (*model.parameters(), *model.buffers())
            }
            copy.deepcopy(model, shapes)(
                torch.empty(1, *input_shape, device=next(model.parameters()).device)
            )
    except ValueError as error:
        return "more than 1 value per channel" in str(error)  # of torch.nn.functional.batch_norm
    except Exception:  # a model that reads values can't be run on shapes alone
        return any(isinstance(module, nn.BatchNorm1d) for module in norms)
    return False
