"""From a recipe to its parts, the same on every rank and in every command."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.schema import RunConfig
from lockstep.data.keyed import DATA, key, keys, seeded
from lockstep.data.loader import read
from lockstep.data.samples import Samples, as_samples
from lockstep.engine.parts import Parts
from lockstep.errors import ConfigError, is_out_of_memory
from lockstep.module.check_model import check_model
from lockstep.module.precision import use_precision
from lockstep.parallel.bucket import is_dense


def build_parts(config: RunConfig, build: Callable[[], Parts]) -> Parts:
    """A recipe's parts.

    Torch's, numpy's and Python's generators are seeded by the run's seed itself, as a hand-written job does, so that
    the same seed starts both from the same weights.

    Raises:
        ConfigError: The recipe gives something else than parts, or a model that can't be used or that this machine has
            no memory for.
    """
    try:
        with seeded(config.seed):
            parts = build()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            "the model does not fit into this machine's memory",
            problem=str(error).partition("\n")[0][:200],
            fix="choose a smaller model: lockstep config SOURCE shows the settings",
        ) from error
    if not isinstance(parts, Parts):
        raise ConfigError(
            f"the recipe's build gave {_kind(parts)}, not Parts", fix="return Parts(model=..., loss=..., ...)"
        )
    check_model(parts.model)
    return parts


def open_data(config: RunConfig, parts: Parts, *, train: bool) -> Samples:
    """A recipe's training or held-out samples; what it draws for them (a split, say) is the same at every opening.

    Raises:
        ConfigError: The recipe gives something that samples can't be read from.
    """
    name = "train_data" if train else "eval_data"
    opener = getattr(parts, name)
    if not callable(opener):
        raise ConfigError(f"the recipe's {name} is {_kind(opener)}, not a function", fix=f"{name}=lambda: ...")
    with seeded(key(config.seed, DATA, int(train))):
        samples = opener()
    if not hasattr(samples, "batch"):
        raise ConfigError(
            f"the recipe's {name} opens {_kind(samples)}, which has no batch(indices, keys)",
            fix=f"for a torch data set: {name}=lambda: DatasetSamples(...)",
        )
    try:
        len(samples)
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"the recipe's {name} opens {_kind(samples)} whose length can't be used: {error}",
            fix="give it a __len__ that returns the number of samples",
        ) from error
    return samples  # type: ignore[no-any-return]  # it has what SampleSource asks for: just looked at


def input_shape(parts: Parts, config: RunConfig) -> tuple[int, ...]:
    """The shape of one sample's input, without the batch: as the recipe has it, or that of the first held-out sample.

    Raises:
        ConfigError: The model's input is not one tensor of floats.
    """
    if parts.input_shape is not None:
        return parts.input_shape
    samples = open_data(config, parts, train=False)
    first = np.zeros(1, dtype=np.int64)
    batch = read(samples, first, keys(0, 0, first))
    finish = as_samples(samples).finish
    inputs = (batch if finish is None else finish(batch)).inputs
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ConfigError(
            "a model can be exported whose input is one tensor of floats", given=f"{type(inputs).__name__} here"
        )
    return tuple(inputs.shape[1:])


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def prepare_model(model: nn.Module, config: RunConfig, device: torch.device, *, is_sharded: bool = False) -> nn.Module:
    """The model on a device, its parameters dense in memory, those of 2-d convolutions with the channels last if asked.

    Fused optimizers go through memory without a look at strides, so gaps would be counted in. The model computes in the
    precision that is asked for, wherever it is called. One that is going to be sharded stays where it is, its
    parameters in the plain order, which is the only one that torch can shard.

    Raises:
        ConfigError: The device can't compute in that precision.
    """
    if not is_sharded:
        model = model.to(device)
    for parameter in model.parameters():
        if is_sharded:
            parameter.data = parameter.data.contiguous()
        elif config.channels_last and parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        elif not is_dense(parameter):
            parameter.data = parameter.data.contiguous()
    use_precision(model, config, device)
    return model
