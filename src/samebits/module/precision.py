"""Precision of a model's computation: fp32, tf32, bf16 or fp16 (`precision`).

Weights, gradients and their sums, the optimizer, the loss and batch norm's statistics are always fp32 (Micikevicius et
al., "Mixed Precision Training", 2018).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samebits.data.samples import map_tensors
from samebits.errors import ConfigError

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def use_precision(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Make a model compute in the configured precision, wherever it is called.

    In bf16 and fp16, its forward pass runs under torch's autocast, and its outputs are converted to float32, so that
    losses and metrics compute in float32.

    Args:
        model: The model, on its device. Its class is replaced by a subclass with another `forward`.

    Raises:
        ConfigError: The device does not support the precision.
    """
    precision = config.precision
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    if precision == "tf32" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        raise ConfigError(
            f"precision=tf32 needs an NVIDIA GPU, Ampere or newer, and the device is {where}",
            allowed="fp32, bf16, fp16" if device.type == "cpu" else "fp32, fp16",
            fix="Set precision=fp32.",
        )
    if precision in LOW and not _can_autocast(device, LOW[precision]):
        raise ConfigError(
            f"{where} can't compute in {precision} with torch {torch.__version__}",
            fix="Set precision=fp32.",
        )
    tf32 = "tf32" if precision == "tf32" else "ieee"
    backends: Any = torch.backends
    # Parts of torch (torch.export) still read the older flags, and raise an error if the two disagree.
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = precision == "tf32"
    for operations in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operations.fp32_precision = tf32
    if precision not in LOW:
        return
    kind = type(model)
    dtype = LOW[precision]
    # Autocast caches converted weights for all threads of a process. With batch_norm=sync, several micro-batches are
    # in flight at once, and which one fills the cache would depend on the number of processes.
    keep = config.batch_norm != "sync"

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=keep):
            outputs = kind.forward(self, *args, **kwargs)
        return in_float32(outputs)

    # In its class, since a deep copy would share a `forward` of the instance, with the weights of the original.
    model.__class__ = type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__}
    )


def in_float32(outputs: Any) -> Any:
    """Convert bf16 and fp16 tensors of any shape to float32, also inside tuples, lists, dicts and data classes."""

    def full(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in LOW.values() else tensor

    return map_tensors(outputs, full)


def describe_precision(config: RunConfig) -> str:
    """Describe the precision for the run's header."""
    scale = f", loss scale {config.loss_scale}" if config.precision == "fp16" else ""
    return f"{config.precision} in the model, fp32 in weights, loss and optimizer{scale}"


def _can_autocast(device: torch.device, dtype: torch.dtype) -> bool:
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return False  # torch would emulate it, slowly
    values = torch.ones(2, 2, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # on an unsupported device, autocast only warns
            with torch.autocast(device.type, dtype=dtype):
                return (values @ values).dtype == dtype
    except (RuntimeError, UserWarning):
        return False
