"""Checks of a recipe's model before it is used, so that a fault is named and not met in the middle of torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError
from lockstep.storage.tensor_file import TYPES


def check_model(model: object) -> None:
    """Check that a model can be trained, evaluated and saved.

    Raises:
        ConfigError: It is not a module, or a tensor of it has no shape or no values yet, or can't be saved.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the recipe's model is a {type(model).__name__}, not a torch.nn.Module", fix="return Parts(model=..., ...)"
        )
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise ConfigError(
                f"{name} of the recipe's model has no shape yet",
                cause="a lazy module, such as LazyLinear, gets its shapes from a first input",
                fix="give the sizes (nn.Linear(64, 10)), or call the model once on an example in build",
            )
        if value.is_meta:
            raise ConfigError(
                f"{name} of the recipe's model has no values: it is on the meta device", fix="build on CPU"
            )
    for name, entry in model.state_dict().items():
        if not isinstance(entry, Tensor):
            raise ConfigError(
                f"{name} in the model's state_dict is a {type(entry).__name__}, which can't be saved",
                cause="a module has get_extra_state",
                fix="keep it as a buffer: register_buffer(NAME, tensor)",
            )
        if entry.dtype not in TYPES:
            raise ConfigError(
                f"{name} of the recipe's model is {entry.dtype}, which can't be saved",
                allowed=", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES),
                fix="convert it, or leave it out: register_buffer(..., persistent=False)",
            )


def check_trainable(model: nn.Module) -> None:
    """Check that a model has parameters to train, of a type that can be trained.

    Raises:
        ConfigError: It has not.
    """
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not trained:
        raise ConfigError(
            "no parameter of the recipe's model requires a gradient, so there is nothing to train",
            fix="freeze less, or give the model parameters",
        )
    for name, value in trained:
        if value.dtype != torch.float32:
            raise ConfigError(
                f"parameter {name} is {value.dtype}: only float32 parameters can be trained",
                fix="build the model in float32 (model.float()); precision=bf16 or fp16 computes in 16 bits",
            )
