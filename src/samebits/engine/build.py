"""From a recipe to its parts, equal on every rank and in every command."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.config.interval import parse_fraction
from samebits.config.schema import RunConfig
from samebits.data.division import EVEN, IN_TURN
from samebits.data.keyed import DATA, key, keys
from samebits.data.loader import read
from samebits.data.order import Order
from samebits.data.samples import Samples, as_samples, groups_of
from samebits.data.seeding import seeded
from samebits.engine.parts import Parts
from samebits.errors import ConfigError, DataError, is_out_of_memory
from samebits.metrics.make import make_metric
from samebits.module.check_model import check_model
from samebits.module.precision import use_precision
from samebits.parallel.layout import is_dense


def build_parts(config: RunConfig, build: Callable[[], Parts]) -> Parts:
    """Build a recipe's parts.

    The generators of torch, numpy and Python are seeded with the run's seed itself, as in a hand-written script: the
    same seed then starts both from the same weights.

    Raises:
        ConfigError: The recipe returns no parts, or a model that cannot be used or does not fit into memory.
    """
    try:
        with seeded(config.seed):
            parts = build()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            "the model does not fit into this machine's memory",
            cause=str(error).partition("\n")[0][:200],
            fix="Choose a smaller model; samebits config SOURCE lists the settings.",
        ) from error
    if not isinstance(parts, Parts):
        raise ConfigError(
            f"the recipe's build returned {_kind(parts)}, not Parts", fix="Return Parts(model=..., loss=..., ...)."
        )
    check_model(parts.model)
    return replace(parts, metric=partial(make_metric, parts.metric))


def open_data(config: RunConfig, parts: Parts, *, train: bool) -> Samples:
    """Open a recipe's training or validation samples; random choices (such as a split) are equal at every opening.

    Raises:
        ConfigError: The recipe returns an object that has no samples.
    """
    name = "train_data" if train else "eval_data"
    return _open(config, getattr(parts, name), name, train=train)


def open_eval_sets(config: RunConfig, parts: Parts) -> dict[str, Samples]:
    """Open a recipe's further validation sets, by name.

    Raises:
        ConfigError: The recipe returns an object that has no samples.
    """
    return {
        name: _open(config, opener, f'eval_sets["{name}"]', train=False) for name, opener in parts.eval_sets.items()
    }


def _open(config: RunConfig, opener: object, name: str, *, train: bool) -> Samples:
    if not callable(opener):
        raise ConfigError(f"the recipe's {name} is {_kind(opener)}, not a function", fix=f"Set {name}=lambda: ....")
    with seeded(key(config.seed, DATA, int(train))):
        samples = opener()
    if not hasattr(samples, "batch"):
        raise ConfigError(
            f"the recipe's {name} opens {_kind(samples)}, which has no batch(indices, keys)",
            fix=f"For a torch dataset, set {name}=lambda: DatasetSamples(...).",
        )
    try:
        # torch's Dataset has no __len__, and some datasets have one that raises. The order needs the length now.
        len(samples)
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"the recipe's {name} opens {_kind(samples)} whose length can't be used: {error}",
            fix="Give it a __len__ that returns the number of samples.",
        ) from error
    return samples  # type: ignore[no-any-return]  # it has the members of Samples, as just checked


def input_shape(parts: Parts, config: RunConfig) -> tuple[int, ...]:
    """Return the shape of one sample's input without the batch dimension, such as `(C, H, W)`.

    It is `Parts.input_shape`, or else the shape of the first validation sample.

    Raises:
        ConfigError: The model's input is not one floating-point tensor.
    """
    if parts.input_shape is not None:
        return parts.input_shape
    inputs = first_inputs(open_data(config, parts, train=False))
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ConfigError(
            f"the model's input is a {type(inputs).__name__}, and export needs one floating-point tensor",
            fix="Let the recipe's samples have one tensor of floats as inputs.",
        )
    return tuple(inputs.shape[1:])


def first_inputs(samples: Samples) -> Any:
    """Return the model's inputs for the first sample, as a batch of one."""
    first = np.zeros(1, dtype=np.int64)
    batch = read(samples, first, keys(0, 0, first))
    finish = as_samples(samples).finish
    return (batch if finish is None else finish(batch)).inputs


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def prepare_model(model: nn.Module, config: RunConfig, device: torch.device) -> nn.Module:
    """Move a model, in place, to its device, make its parameters dense and set its precision.

    Parameters must be dense because fused optimizers ignore strides and would update gaps too. 4-d parameters
    `(O, I, H, W)` are laid out channels last if configured.

    Raises:
        ConfigError: The device does not support the precision.
    """
    model = model.to(device)
    for parameter in model.parameters():
        if config.channels_last and parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        elif not is_dense(parameter):
            parameter.data = parameter.data.contiguous()
    use_precision(model, config, device)
    return model


def check_not_empty(sizes: Mapping[str, int]) -> None:
    """Check that all datasets have samples."""
    for name, size in sizes.items():
        if size == 0:
            raise DataError(f"the {name} set is empty", fix="Give it at least one sample.")


def make_order(config: RunConfig, train_data: Samples, world_size: int, *, is_sharded: bool) -> Order:
    """Return the order of the training samples. One rank alone cannot recheck; a sharded model pads its passes."""
    return Order(
        len(train_data), config.global_batch, config.micro_batch, config.seed, groups_of(train_data),
        division=IN_TURN if is_sharded else EVEN,
        recheck=parse_fraction(config.watch.recheck) if config.watch.recheck is not None and world_size > 1 else 0.0,
    )  # fmt: skip
