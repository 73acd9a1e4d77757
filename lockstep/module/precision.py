"""Runs a model in fp32, tf32, bf16 or fp16 (`precision`).

Weights, gradients, their sum, the optimizer, the loss and batch norm's statistics are fp32 in all of them. Mixed
precision: Micikevicius et al., "Mixed Precision Training", 2018.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def use_precision(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Let a model compute in the precision that the settings ask for, wherever it is called.

    In bf16 and fp16 its forward pass runs under torch's autocast, and what it gives is turned into float32, so that
    losses and metrics see float32.

    Args:
        model: On its device; its class becomes a subclass of what it was, and nothing else of it changes.
        config: The settings.
        device: Where it computes.

    Raises:
        ConfigError: The device can't do that.
    """
    _check(config.precision, device)
    tf32 = "tf32" if config.precision == "tf32" else "ieee"
    backends: Any = torch.backends
    # Parts of torch (torch.export) still ask by the older names, and refuse to go on where the two differ.
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = config.precision == "tf32"
    for operations in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operations.fp32_precision = tf32
    if config.precision not in LOW:
        return
    kind, dtype = type(model), LOW[config.precision]
    # Autocast keeps the weights that it has converted, for all threads together. Where the passes of several
    # micro-batches are under way at once, who finds them there would depend on the number of processes.
    keep = config.batch_norm != "sync"

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=keep):
            outputs = kind.forward(self, *args, **kwargs)
        return in_float32(outputs)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def in_float32(outputs: Any) -> Any:
    """The same with all bf16 and fp16 tensors in float32: in tuples, lists, dicts and data classes too."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in LOW.values() else outputs
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(in_float32, outputs))
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(in_float32, outputs))
    if isinstance(outputs, dict):
        return type(outputs)((name, in_float32(value)) for name, value in outputs.items())
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        values = {field.name: in_float32(getattr(outputs, field.name)) for field in dataclasses.fields(outputs)}
        return dataclasses.replace(outputs, **values)
    return outputs


def describe_precision(config: RunConfig) -> str:
    """For the head of a run."""
    scale = f", loss scale {config.loss_scale}" if config.precision == "fp16" else ""
    return f"{config.precision} in the model, fp32 in weights, loss and optimizer{scale}"


def _check(precision: str, device: torch.device) -> None:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    if precision == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise ConfigError(
            f"precision=tf32 needs an NVIDIA GPU, Ampere or newer, and the device is {where}",
            allowed="fp32, bf16, fp16" if device.type == "cpu" else "fp32, fp16",
        )
    if precision in LOW and not _can_autocast(device, LOW[precision]):
        raise ConfigError(f"{where} can't compute in {precision} with torch {torch.__version__}", fix="precision=fp32")


def _can_autocast(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return False  # torch would imitate it, slowly
    values = torch.ones(2, 2, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # where it can't, autocast only warns
            with torch.autocast(device.type, dtype=dtype):
                return (values @ values).dtype == dtype
    except (RuntimeError, UserWarning):
        return False
