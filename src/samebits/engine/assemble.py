"""Assembly of a run's job on the world's device, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.engine.build import build_parts, check_not_empty, make_order, open_data, open_eval_sets, prepare_model
from samebits.engine.job import MAX_TERMS, Job
from samebits.engine.parts import Parts
from samebits.engine.progress import Progress, init_scale
from samebits.module.activation_checkpointing import checkpoint_activations
from samebits.module.check_model import check_batches, check_trainable
from samebits.module.determinism import check_kernels, use_deterministic_algorithms
from samebits.module.ema import ModelEma
from samebits.optim.build import optimizer
from samebits.parallel.exact_fsdp.replica import ExactShards
from samebits.parallel.replica import Replica, WholeReplica
from samebits.provenance.fingerprint import take_fingerprint
from samebits.provenance.same_run import check_ranks_agree

if TYPE_CHECKING:
    from samebits.module.compiled import Compiled


def make_job(config: RunConfig, build: Callable[[], Parts], world: World, *, is_restart: bool = False) -> Job:
    """Build a recipe's parts on the world's device, equal on all ranks, and open its data; a restart checks once only.

    Raises:
        LaunchError: The ranks differ in code, settings, data or model.
        DataError: The data cannot be read.
        ConfigError: The settings do not fit data or model; in exact mode, a second pass has other values.
    """
    use_deterministic_algorithms(config, world.device)
    check_kernels(config)
    parts = build_parts(config, build)
    check_trainable(parts.model)
    parts.metric()  # it checks that the metric has all members
    # A single process always has a whole model.
    is_sharded = config.parallel == "fsdp" and world.size > 1
    model = prepare_model(parts.model, config, world.device)
    train_data, eval_data = open_data(config, parts, train=True), open_data(config, parts, train=False)
    eval_sets = open_eval_sets(config, parts)
    sizes = {"training": len(train_data), "validation": len(eval_data)}
    sizes |= {f"{name} validation": len(samples) for name, samples in eval_sets.items()}
    fingerprint = take_fingerprint(
        config, parts.loss, model, (train_data, eval_data), world.device,
        num_ranks_here=world.num_ranks_here, is_restart=is_restart, is_sharded=is_sharded,
    )  # fmt: skip
    warnings = check_ranks_agree(world, config, model, sizes, fingerprint)
    if config.watch.recheck is not None and world.size == 1:
        warnings.append("watch.recheck needs two or more processes: nothing is repeated on this one")
    check_not_empty(sizes)
    check_batches(config, model, len(train_data), parts.input_shape)
    checkpoint_activations(model, config.activation_checkpointing)
    replica: Replica = ExactShards(model, world) if is_sharded else WholeReplica(model, world)
    average = config.optim.ema
    order = make_order(config, train_data, world.size, is_sharded=is_sharded)
    return Job(
        config=config,
        world=world,
        parts=parts,
        model=model,
        optimizer=optimizer(replica.trained, config.optim),
        reducer=replica.make_reducer(
            order,
            exact=config.mode == "exact",
            num_extras=MAX_TERMS,
            synchronized=config.batch_norm == "sync",
            compress=config.compress,
        ),
        order=order,
        train_data=train_data,
        eval_data=eval_data,
        eval_sets=eval_sets,
        progress=Progress(loss_scale=init_scale(config), train_size=len(train_data)),
        average=ModelEma(model, average, replica.state) if average is not None else None,
        replica=replica,
        compiled=_compile(model, world) if config.compile else None,
        fingerprint=fingerprint,
        warnings=warnings,
    )


def _compile(model: nn.Module, world: World) -> Compiled:
    from samebits.module.compiled import Compiled  # late: torch's compiler takes a second to import

    return Compiled(model, world.device)


def init_weights(job: Job, build: Callable[[], Parts]) -> Mapping[str, str]:
    """Initialize the fresh model on rank 0 and broadcast it; return the recipe's rows for the run's header.

    `build` builds the recipe's parts again, for a whole model if this one is sharded.
    """
    start = job.parts.init_weights
    if start is None:
        return {}
    # Only rank 0 reads the file of pretrained weights; the other ranks need no access to it (ADR 12).
    model: nn.Module | None = job.model if job.world.is_main else None
    if model is not None and job.replica.is_sharded:  # the recipe fills a whole model, on rank 0's host
        model = build_parts(job.config, build).model
    rows = collectives.run_on_rank0(job.world, lambda: dict(start(model)) if model is not None else {})
    job.replica.load(model.state_dict() if model is not None else None)
    # Otherwise the average would start from the recipe's random weights, not from the loaded ones.
    if job.average is not None:
        job.average.reset(job.state())
    return rows
