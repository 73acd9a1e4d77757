"""One process's part of a run, from settings to `result.json`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from lockstep.cluster import collect
from lockstep.cluster.heartbeat import Heartbeat
from lockstep.cluster.stop import StopSignal
from lockstep.cluster.world import World
from lockstep.config.document import to_yaml
from lockstep.config.given import flat
from lockstep.config.schema import RunConfig
from lockstep.data.even import EvenOrder
from lockstep.data.groups import groups_of
from lockstep.data.loader import lost_reader
from lockstep.data.order import Order
from lockstep.engine.build import build_parts, lay_out, open_data
from lockstep.engine.check_model import check_trainable
from lockstep.engine.checkpoint import steps
from lockstep.engine.determinism import configure
from lockstep.engine.ema import Average
from lockstep.engine.environment import environment
from lockstep.engine.facts import Recipe, facts_for, keep_facts
from lockstep.engine.fingerprint import take_fingerprint
from lockstep.engine.job import MAX_TERMS, Job, Progress
from lockstep.engine.loop import train
from lockstep.engine.nonfinite import RollBack
from lockstep.engine.parts import Parts
from lockstep.engine.precision import first_scale
from lockstep.engine.recipe_copy import keep_recipe
from lockstep.engine.recompute import recompute
from lockstep.engine.reports import Reports
from lockstep.engine.request import Request
from lockstep.engine.resumed import check_unchanged
from lockstep.engine.run_folder import RunFolder, write_whole
from lockstep.engine.run_identity import identity
from lockstep.engine.same_run import check_came_from, check_ranks_agree, check_same_run, plain_settings
from lockstep.engine.saving import Saver
from lockstep.engine.stopping import StopFlag
from lockstep.engine.summary import finish, head
from lockstep.errors import ConfigError, DataError
from lockstep.optim.build import optimizer
from lockstep.parallel.compress import Compression
from lockstep.parallel.data_parallel import on_all_gpus
from lockstep.parallel.reduce import Reducer
from lockstep.report.console import Console
from lockstep.report.log import log_path, rank_log
from lockstep.report.starting import said_if_slow

if TYPE_CHECKING:
    from lockstep.engine.compiled import Compiled
    from lockstep.parallel.sharded import Shards


def run(request: Request, recipe: Recipe, world: World, stop: StopSignal) -> int:
    """Train.

    Returns:
        0 if the run is complete, or 128 + the signal's number if it was asked to stop and has saved.

    Raises:
        LockstepError: Anything that a person can do something about.
    """
    folder = RunFolder(request.folder)
    with rank_log(request.folder, world.rank):
        if world.is_main:
            folder.open()
        try:
            with in_another_terminal(request.folder, world) as tell:
                code = _run(request, recipe, world, stop, folder)
                tell("done" if code == 0 else "stopped")
            return code
        except RuntimeError as error:
            if (lost := lost_reader(error)) is not None:
                raise lost from None
            raise
        finally:
            folder.close()


def _run(request: Request, recipe: Recipe, world: World, stop: StopSignal, folder: RunFolder) -> int:
    config, origin = request.config, _origin(request, folder)
    if world.is_main:
        check_same_run(folder, config, "auto" if request.is_restart else request.resume)
        if origin is not None and origin != folder.path:
            check_came_from(RunFolder(origin), config)
    with said_if_slow("getting ready: data and model" if world.is_main else ""):
        facts = facts_for(recipe, config, world, origin)
        job = make_job(config, lambda: recipe.build(config, facts), world, is_restart=request.is_restart)
        job.identity = identity(config, facts)
        saver = Saver(folder, config.checkpoint, world)
        passed_over: list[object] = []
        # After a restart the run goes on from what it saved, however it was begun.
        restored = request.is_restart and saver.restore(job, "auto", passed_over.append)
        if not restored and request.resume != "never":
            restored = saver.restore(job, request.resume, passed_over.append)
        started = {} if restored else _start(job, lambda: recipe.build(config, facts))
        if job.resumed_from is not None:
            before = job.resumed_from
            job.warnings += collect.from_main(world, lambda: check_unchanged(before, job.fingerprint, config))
    job.note_world()
    reports = Reports(job, folder)
    reports.settings = flat(request.diff)
    try:
        if world.is_main:
            # A run that died before its first checkpoint may begin anew with other settings.
            if not restored or not folder.config.exists():
                write_whole(folder.path / "config.diff.yaml", to_yaml(request.diff).encode())
                write_whole(folder.config, to_yaml(plain_settings(config)).encode())
                keep_facts(folder, facts)
                keep_recipe(folder, config.recipe)
            folder.write_json("environment.json", {**environment(world), "worlds": job.progress.worlds})
        reports.block(*head(request, job, started))
        for note in [*passed_over, *job.warnings]:
            reports.say(note)
        stop_flag = StopFlag(world, stop)
        with Heartbeat(world, config.watch.hang_timeout_s, folder.path / "logs") as heartbeat, job.compiling():
            reports.work_of_ranks = heartbeat.work
            while True:
                try:
                    is_complete = train(job, saver, reports, stop_flag, stop_flag.is_asked)
                    break
                except RollBack:
                    saver.restore(job, "auto", reports.say)
        if not is_complete:
            reports.say(
                f"stopped after step {job.progress.step:,} and saved; go on with\n"
                f"  lockstep train --run-dir {shlex.quote(str(folder.path))} --resume auto"
            )
            return stop.exit_code or 143
        waits = collect.gather_all(world, (world.pulse.work_s, world.pulse.wait_s))
        weights = job.final_weights()
        if world.is_main:
            finish(request, job, folder, reports, weights, waits)
        return 0
    finally:
        reports.close()


@contextmanager
def in_another_terminal(folder: Path, world: World) -> Iterator[Callable[[str], None]]:
    """Let a rank that a person has started by hand beside rank 0's say that it has joined, and how it ended."""
    if world.is_main or world.placement.started_by != "command line":
        yield lambda _: None
        return
    console = Console(sys.stdout)
    me = f"rank {world.rank} of {world.size}"
    where = world.placement.init
    console.say(f"{me} joined at {where}; rank 0 tells how it goes, and {log_path(folder, world.rank)} has the rest")
    yield lambda end: console.say(f"{me}: {end}")


def _origin(request: Request, folder: RunFolder) -> Path | None:
    """The run folder that this run goes on from, if it does."""
    if request.resume not in ("never", "auto"):
        return Path(request.resume).absolute().parent.parent
    goes_on = request.is_restart or request.resume == "auto"
    return folder.path if goes_on and steps(folder.checkpoints) else None


def _start(job: Job, build: Callable[[], Parts]) -> Mapping[str, str]:
    """Bring the fresh model to where training starts, on rank 0, and give it to the others; rows for the head."""
    start = job.parts.start
    if start is None:
        return {}
    if job.shards is None:
        rows = collect.from_main(job.world, lambda: dict(start(job.model)))
        collect.broadcast_tensors(job.world, list(job.model.state_dict().values()))
    else:  # what it fills is a whole model, on rank 0's host
        model = build_parts(job.config, build).model if job.world.is_main else None
        rows = collect.from_main(job.world, lambda: dict(start(model)) if model is not None else {})
        job.shards.load(model.state_dict() if model is not None else None)
    if job.average is not None:
        job.average.begin(job.state())
    return rows


def make_job(config: RunConfig, build: Callable[[], Parts], world: World, *, is_restart: bool = False) -> Job:
    """Build a recipe's parts on the world's device, equal on all ranks, and open its data.

    Raises:
        LaunchError: The ranks are not about to do the same.
        DataError, ConfigError: The data can't be read, or can't be trained on with these settings; in exact mode, the
            recipe gives other values the second time.
    """
    configure(config, world.device)
    parts = build_parts(config, build)
    check_trainable(parts.model)
    is_sharded = config.parallel == "fsdp" and world.size > 1
    model = lay_out(parts.model, config, world.device, is_sharded=is_sharded)
    train_data, eval_data = open_data(config, parts, train=True), open_data(config, parts, train=False)
    fingerprint = take_fingerprint(
        config, parts, model, (train_data, eval_data), world.device,
        num_ranks_here=-(-world.size // world.num_hosts), is_restart=is_restart,
    )  # fmt: skip
    warnings = check_ranks_agree(world, config, model, (len(train_data), len(eval_data)), fingerprint)
    if len(train_data) == 0:
        raise DataError("the training set is empty", do="give it at least one sample")
    if len(eval_data) == 0:
        raise DataError("the evaluation set is empty", do="give it at least one sample")
    check_batches(config, model, len(train_data))
    recompute(model, config.activation_checkpointing)
    shards = _shard(model, world) if is_sharded else None
    kind = EvenOrder if is_sharded else Order
    average = config.optim.ema
    return Job(
        config=config,
        world=world,
        parts=parts,
        model=model,
        optimizer=optimizer(model if shards is None else nn.ParameterList(shards.parameters.values()), config.optim),
        reducer=Reducer(
            model,
            world,
            exact=config.mode == "exact",
            num_extras=MAX_TERMS,
            synchronised=config.batch_norm == "sync",
            compress=Compression(config.compress, config.powersgd_rank),
        )
        if shards is None
        else shards.reducer(MAX_TERMS),
        order=kind(len(train_data), config.global_batch, config.micro_batch, config.seed, groups_of(train_data)),
        train_data=train_data,
        eval_data=eval_data,
        progress=Progress(loss_scale=first_scale(config), train_size=len(train_data)),
        average=Average(model, average, shards.state if shards else None) if average is not None else None,
        shards=shards,
        compiled=_compile(model, world) if config.compile else None,
        on_all_gpus=on_all_gpus(model, world) if config.parallel == "dp" else None,
        fingerprint=fingerprint,
        warnings=warnings,
    )


def _shard(model: nn.Module, world: World) -> Shards:
    from lockstep.parallel.sharded import Shards  # late: torch's FSDP takes a second to import

    return Shards(model, world)


def _compile(model: nn.Module, world: World) -> Compiled:
    from lockstep.engine.compiled import Compiled  # late: torch's compiler takes a second to import

    return Compiled(model, world.device)


def check_batches(config: RunConfig, model: nn.Module, num_samples: int) -> None:
    """See that batch norm over single values never meets a micro-batch (with batch_norm=sync, a step) of one sample.

    Raises:
        ConfigError: It would, at the latest at the end of the first epoch.
    """
    # One in evaluation mode takes no statistics.
    if not any(isinstance(module, nn.BatchNorm1d) and module.training for module in model.modules()):
        return
    steps = {min(config.global_batch, num_samples), num_samples % config.global_batch or config.global_batch}
    is_sync = config.batch_norm == "sync"
    # A step is cut evenly into as few micro-batches as it takes.
    if 1 in (steps if is_sync else {step // -(-step // config.micro_batch) for step in steps}):
        raise ConfigError(
            f"batch norm can't work with a {'step' if is_sync else 'micro-batch'} of one sample",
            given=f"{num_samples:,} samples, global_batch={config.global_batch}, micro_batch={config.micro_batch}: "
            f"an epoch's last step has {num_samples % config.global_batch or config.global_batch}",
            do="micro_batch=3 or more"
            if config.micro_batch < 3 and not is_sync and 1 not in steps
            else f"global_batch={config.global_batch + 1}",
        )
