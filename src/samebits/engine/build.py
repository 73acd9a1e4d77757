"""From a recipe to its parts, equal on every rank and in every command."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.keyed import DATA, key, keys
from samebits.data.loader import read
from samebits.data.order import Order
from samebits.data.samples import Samples, as_samples, groups_of
from samebits.data.seeding import seeded
from samebits.engine.job import MAX_TERMS, Job
from samebits.engine.parts import Parts
from samebits.engine.progress import Progress, init_scale
from samebits.errors import CheckpointError, ConfigError, DataError, is_out_of_memory
from samebits.host_memory import keep_freed_memory
from samebits.metrics.metric import make_metric
from samebits.module.activation_checkpointing import checkpoint_activations
from samebits.module.check_model import check_batches, check_model, check_trainable
from samebits.module.determinism import use_deterministic_algorithms
from samebits.module.ema import ModelEma
from samebits.module.precision import use_precision
from samebits.optim.build import optimizer
from samebits.parallel.bucket import is_dense
from samebits.parallel.recoverable import RecoverableReducer
from samebits.parallel.reduce import Reducer
from samebits.provenance.fingerprint import take_fingerprint
from samebits.provenance.identity import DATASET_INFO, check_dataset_info, check_ranks_agree
from samebits.storage.manifest import sha256_of_file
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import identity_of

# Dataset info: values that a recipe reads from its data once and stores with the run, such as class names.
#
# A recipe returns it from `dataset_info(config)`, which is called on rank 0 when a run starts, and receives it in
# `build(config, dataset_info)`. Later commands read `dataset_info.json` from the run folder and need no data.


FILE_NAME = "dataset_info.json"
WEIGHTS = "weights"  # what a run starts from: SHA-256, and the source of published ones
DatasetInfo = dict[str, Any]


class Recipe(Protocol):
    """A recipe, as the engine uses it."""

    def dataset_info(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what the run stores about the dataset, as plain JSON; an empty dict if there is nothing to store."""

    def build(self, config: RunConfig, dataset_info: Mapping[str, Any]) -> Parts:
        """Build the recipe's parts."""


def find_dataset_info(recipe: Recipe, config: RunConfig) -> DatasetInfo:
    """Call the recipe's `dataset_info` with all generators seeded by the run's seed, and add the initial weights' hash.

    Raises:
        ConfigError: The result is not plain JSON.
        DataError: Raised by the recipe about its data.
    """
    with seeded(config.seed):
        found = recipe.dataset_info(config)
    try:
        # To JSON and back: a fresh run then sees the same types (no tuples, no numbers as keys) as a resumed one.
        dataset_info = json.loads(json.dumps(found))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the result of the recipe's dataset_info can't be written as JSON",
            cause=error,
            fix="Return a dict of plain values, lists and dicts.",
        ) from None
    if not isinstance(dataset_info, dict):
        raise ConfigError(
            f"the recipe's dataset_info returned a {type(found).__name__}, not a dict",
            fix="Return {name: value}.",
        )
    if (
        path := initial_weights(config)
    ) is not None and path.is_file():  # a missing one is reported when it is loaded
        dataset_info.setdefault(WEIGHTS, {"sha256": sha256_of_file(path)})
    return dataset_info


def initial_weights(config: RunConfig) -> Path | None:
    """Return the file of weights that a run starts from, in `model.weights`; None if it names none."""
    weights = getattr(getattr(config, "model", None), "weights", None)
    return weights.expanduser() if isinstance(weights, Path) else None


def read_dataset_info(folder: Path) -> DatasetInfo | None:
    """Read the dataset info of a run; None if the run stores none. Raises CheckpointError if the file is damaged."""
    # lexists: a dangling link is a damaged run folder and raises an error, instead of counting as "stores none".
    return RunFolder(folder).read_json(FILE_NAME) if os.path.lexists(folder / FILE_NAME) else None


def build_from(recipe: Recipe, config: RunConfig, dataset_info: DatasetInfo, run: Path) -> Parts:
    """Build a recipe's parts from the dataset info of a run.

    If the recipe is a file and a checkpoint proves that the dataset info is the run's own, an error is a bug in the
    recipe and raised as it is.

    Raises:
        CheckpointError: The dataset info does not fit the recipe.
    """
    try:
        return recipe.build(config, dataset_info)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        is_own = (
            config.recipe.endswith(".py")
            and identity_of(run, "last")[1].get(DATASET_INFO) is not None
        )
        if is_own or is_out_of_memory(error) or not os.path.lexists(run / FILE_NAME):
            raise
        raise CheckpointError(
            f"{run / FILE_NAME} does not fit the recipe: {type(error).__name__}: {error}",
            cause="The file or the recipe was changed since the run started.",
            fix="Restore both; SAMEBITS_DEBUG=1 shows the traceback.",
        ) from error


def dataset_info_for(
    recipe: Recipe, config: RunConfig, world: World, origin: Path | None
) -> DatasetInfo:
    """Return the dataset info to build a run with, equal on all ranks; rank 0 reads it, from `origin` at a resume.

    Raises:
        CheckpointError: The run's dataset info was altered since it started, or is missing and the data has other info.
    """

    def look() -> DatasetInfo:
        if origin is None:
            return find_dataset_info(recipe, config)
        kept = read_dataset_info(origin)
        dataset_info = find_dataset_info(recipe, config) if kept is None else kept
        check_dataset_info(identity_of(origin, "last")[1], dataset_info, origin)
        return dataset_info

    # Through rank 0, so that an error is raised on every rank, with one text (ADR 12).
    return collectives.run_on_rank0(world, look)


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
            f"the recipe's build returned {_kind(parts)}, not Parts",
            fix="Return Parts(model=..., loss=..., ...).",
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
        name: _open(config, opener, f'eval_sets["{name}"]', train=False)
        for name, opener in parts.eval_sets.items()
    }


def _open(config: RunConfig, opener: object, name: str, *, train: bool) -> Samples:
    if not callable(opener):
        raise ConfigError(
            f"the recipe's {name} is {_kind(opener)}, not a function",
            fix=f"Set {name}=lambda: ....",
        )
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


def make_order(config: RunConfig, train_data: Samples) -> Order:
    """Return the order of the training samples."""
    return Order(
        len(train_data),
        config.global_batch,
        config.micro_batch,
        config.seed,
        groups_of(train_data),
    )


# Assembly of a run's job on the world's device, equal on all ranks.


def make_job(
    config: RunConfig, build: Callable[[], Parts], world: World, *, is_restart: bool = False
) -> Job:
    """Build a recipe's parts on the world's device, equal on all ranks, and open its data; a restart checks once only.

    Raises:
        LaunchError: The ranks differ in code, settings, data or model.
        DataError: The data cannot be read.
        ConfigError: The settings do not fit data or model; a second pass has other values.
    """
    use_deterministic_algorithms(config, world.device)
    parts = build_parts(config, build)
    check_trainable(parts.model)
    parts.metric()  # it checks that the metric has all members
    model = prepare_model(parts.model, config, world.device)
    train_data = open_data(config, parts, train=True)
    eval_data = open_data(config, parts, train=False)
    eval_sets = open_eval_sets(config, parts)
    sizes = {"training": len(train_data), "validation": len(eval_data)}
    sizes |= {f"{name} validation": len(samples) for name, samples in eval_sets.items()}
    fingerprint = take_fingerprint(
        config, parts.loss, model, (train_data, eval_data), world.device,
        num_ranks_here=world.num_ranks_here, is_restart=is_restart,
    )  # fmt: skip
    check_ranks_agree(world, config, model, sizes, fingerprint)
    check_not_empty(sizes)
    check_batches(config, model, len(train_data), parts.input_shape)
    checkpoint_activations(model, config.activation_checkpointing)
    if world.device.type == "cpu":
        keep_freed_memory()  # of a step, for the next one
    compiled = None
    if config.compile:
        # Late: torch's compiler takes a second to import.
        from samebits.module.compiled import Compiled

        compiled = Compiled(model, world.device)
    average = config.optim.ema
    reducer = Reducer if world.membership is None else RecoverableReducer
    order = make_order(config, train_data)
    return Job(
        config=config,
        world=world,
        parts=parts,
        model=model,
        optimizer=optimizer(model, config.optim),
        reducer=reducer(
            model, world, num_extras=MAX_TERMS, synchronized=config.batch_norm == "sync"
        ),
        order=order,
        train_data=train_data,
        eval_data=eval_data,
        eval_sets=eval_sets,
        progress=Progress(loss_scale=init_scale(config), train_size=len(train_data)),
        average=ModelEma(model, average) if average is not None else None,
        compiled=compiled,
        fingerprint=fingerprint,
    )


def init_weights(job: Job) -> Mapping[str, str]:
    """Initialize the fresh model on rank 0 and broadcast it; return the recipe's rows for the run's header."""
    start = job.parts.init_weights
    if start is None:
        return {}
    # Only rank 0 reads the file of pretrained weights; the other ranks need no access to it (ADR 12).
    rows = collectives.run_on_rank0(job.world, lambda: dict(start(job.model)))
    collectives.broadcast_tensors(job.world, list(job.state().values()))
    # Otherwise the average would start from the recipe's random weights, not from the loaded ones.
    if job.average is not None:
        job.average.reset(job.state())
    return rows
