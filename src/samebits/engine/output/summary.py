"""The header that a run prints at its start, and at its end its closing block, weights and `result.json`."""

import logging
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from samebits.data.division import num_micro_batches
from samebits.engine.job import Job
from samebits.engine.output.recorder import write_provenance
from samebits.engine.output.reports import Reports
from samebits.engine.run_spec import RunSpec
from samebits.extras import is_installed, pip_line
from samebits.module.precision import describe_precision
from samebits.optim.schedule import num_warmup_steps
from samebits.provenance.identity import ways_to_train_longer
from samebits.provenance.record import STATEMENT_FILE, STEPS_FILE
from samebits.report.format import counted, duration, metric_name, metric_value
from samebits.report.records import FILE_NAME as METRICS
from samebits.report.speed import idle_row
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import is_as_recorded, weights_sha256, write_weights
from samebits.version import __version__

LOGGER = logging.getLogger("samebits")


def head(spec: RunSpec, job: Job, started: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return title and rows of the block of a run's start; `started`: the recipe's rows, such as pretrained weights."""
    config = job.config
    world = job.world
    order = job.order
    batch = min(config.global_batch, order.num_samples)
    num_micro = num_micro_batches(batch, config.micro_batch)
    threads = f"{counted(config.num_threads, 'thread')} each"
    described = dict(job.parts.describe)
    num_parameters = sum(parameter.numel() for parameter in job.model.parameters())
    rows = {
        "world": f"{counted(world.size, 'process')} on "
        f"{world.host if world.num_hosts == 1 else f'{world.num_hosts} hosts'} "
        f"({world.device.type}, {world.backend}, {threads})",
        "batch": f"{batch} = {counted(num_micro, 'micro-batch')} of up to {config.micro_batch}",
        "data": f"{order.num_samples:,} training, {len(job.eval_data):,} validation"
        f"{''.join(f', {len(samples):,} {name}' for name, samples in job.eval_sets.items())}: "
        f"{described.pop('data', spec.name)}",
        "model": f"{described.pop('model', type(job.model).__name__)}, {num_parameters:,} parameters",
        "steps": _steps(job),
        **described,
        **started,
    }
    optim = config.optim
    if optim.lr_for_batch is not None:
        rows["lr"] = (
            f"peak {config.peak_lr:g} = {optim.lr:g} x {config.global_batch} / {optim.lr_for_batch}"
        )
    rows["warmup"] = _warmup(job)
    rows["compute"] = _compute(job)
    if optim.ema is not None:
        rows["ema"] = (
            f"the moving average of the weights (decay {optim.ema:g}) is validated and saved"
        )
    rows["idle"] = idle_row(world.size, batch, config.micro_batch)
    if job.progress.step:
        rows["resume"] = f"from step {job.progress.step:,} of {job.num_steps:,}"
    return f"samebits {__version__}  {spec.name}  run {spec.run_folder}", {
        name: text for name, text in rows.items() if text
    }


def _steps(job: Job) -> str:
    epochs = job.config.epochs
    of_epoch = job.order.steps_per_epoch
    text = f"{job.num_steps:,}: {counted(epochs, 'epoch')} of {of_epoch:,}"
    if job.num_steps < epochs * of_epoch:
        text += ", cut by max_steps"
    patience = job.config.stop_early.patience
    if patience is not None:
        text += f"; at most, by stop_early.patience={patience}"
    return text


def _warmup(job: Job) -> str:
    """Describe a warmup that is shorter than optim.warmup_epochs, because the run is short."""
    optim = job.config.optim
    of_epoch = job.order.steps_per_epoch
    num_steps = num_warmup_steps(job.num_steps, of_epoch, optim)
    asked = optim.warmup_epochs * of_epoch
    if num_steps >= asked:
        return ""
    text = f"{math.ceil(num_steps):,} steps, half of the run; optim.warmup_epochs={optim.warmup_epochs:g} would be"
    return f"{text} {math.ceil(asked):,}"


def finish(
    spec: RunSpec,
    job: Job,
    folder: RunFolder,
    reports: Reports,
    waits: Sequence[tuple[float, float]],
) -> None:
    """Write the final weights and `result.json`, and print the closing block. Called on rank 0 of a complete run.

    Args:
        reports: Prints the block.
        waits: Per rank, seconds of its own work in steps and of waiting for all-reduces, since the process started.
    """
    if reports.first_step_at is None and is_as_recorded(folder.path):
        reports.notify(f"this run is already complete. {ways_to_train_longer(folder, job.config)}")
        return
    folder.check_there()
    expected = (
        "config.yaml",
        "environment.json",
        METRICS,
        *([STEPS_FILE] if job.config.record.steps else []),
    )
    if gone := [name for name in expected if not (folder.path / name).exists()]:
        reports.notify(f"warning: {', '.join(gone)} in {folder.path}: deleted during the run")
    progress = job.progress
    state = job.final_weights()
    sha256 = weights_sha256(state)
    write_weights(folder.weights, state)
    root = write_provenance(spec, job, folder, sha256)
    seconds = time.time() - spec.started_at
    first_step = reports.first_step_at and reports.first_step_at - spec.started_at
    compiling = {"compiling": job.compiled.seconds} if job.compiled is not None else {}
    parts = {
        "training": progress.seconds,
        "data_wait": progress.data_s,
        **_summing(waits),
        **compiling,
    }
    result: dict[str, Any] = {
        "name": spec.name,
        "metrics": progress.metrics,
        "best": progress.best,
        "weights_sha256": sha256,
        "chain": progress.chain,
        "root": root,
        "steps": progress.step,
        "samples": progress.num_samples,
        "skipped_steps": progress.skipped,
        **({"overflow_steps": progress.num_overflows} if job.config.precision == "fp16" else {}),
        "worlds": progress.worlds,
        "samples_per_s": progress.num_samples / progress.seconds if progress.seconds else None,
        "first_step_at": reports.first_step_at,
        "seconds": {"first_step": first_step, **parts, "all": seconds},
    }
    folder.write_json("result.json", result)
    LOGGER.info("complete after step %d", progress.step)  # for the events in `samebits report`
    share = min(progress.data_s / progress.seconds, 1.0) if progress.seconds else None
    # Restarts and rollbacks belong to the same command, and are part of its time.
    is_resumed = job.resumed_from is not None and spec.resume != "never" and not spec.is_restart
    name = job.parts.monitor[0]
    quoted = shlex.quote(str(folder.path))
    commands = [
        f"samebits eval {quoted}",
        f"samebits verify {quoted}",
        f"samebits predict {quoted} FILE" if job.parts.preprocess is not None else "",
        _tensorboard(quoted) if job.config.report.tensorboard else "",
    ]
    reports.block(
        f"done in {duration(seconds)}{' since the resume' if is_resumed else ''}: "
        f"validation {metric_name(name)} {metric_value(name, progress.metrics[name])} "
        f"({len(job.eval_data):,} samples, each once)",
        {
            "first step": _first_step(job, first_step),
            "best": _best(job),
            "all-reduce": _waits_row(waits),
            "data": f"{share:.1%} of training time waiting for data" if share is not None else "",
            "weights": f"sha256 {sha256[:8]}…{sha256[-4:]}  {folder.weights}",
            "root": f"sha256 {root[:8]}…{root[-4:]}  {folder.path / STATEMENT_FILE}",
            "next": "\n".join(filter(None, commands)),
        },
        whole=("weights", "root", "next"),
    )


def _best(job: Job) -> str:
    """Name the epoch of the best validation, whose checkpoint the run keeps."""
    best = job.progress.best
    if best is None:  # no value of the metric was a number
        return ""
    name = best["metric"]
    epoch = best["step"] / job.order.steps_per_epoch
    text = f"{metric_name(name)} {metric_value(name, best['value'])} after epoch {epoch:.4g}"
    is_last = best["step"] == job.progress.step
    return f"{text}, the last one" if is_last else f"{text} (samebits eval --checkpoint best)"


def _tensorboard(quoted: str) -> str:
    """Return the command that shows the run's TensorBoard files, or the one that installs what writes them."""
    if is_installed("tensorboard"):
        return f"tensorboard --logdir {quoted}"
    return f"{pip_line('trackers')}  (TensorBoard files of later runs)"


def _compute(job: Job) -> str:
    """Describe precision, memory format, optimizer and compiler."""
    config = job.config
    has_images = any(parameter.dim() == 4 for parameter in job.model.parameters())
    texts = [
        "fp32" if config.precision == "fp32" else describe_precision(config),
        "channels last" if config.channels_last and has_images else "",
        f"{'fused ' if job.optimizer.defaults.get('fused') else ''}{config.optim.name}",
        "torch.compile" if config.compile else "",
        "activation checkpointing" if config.activation_checkpointing else "",
    ]
    return ", ".join(filter(None, texts))


def _first_step(job: Job, seconds: float | None) -> str:
    if seconds is None:
        return ""
    compiling = (
        f"; compiling took {duration(job.compiled.seconds)} of the run"
        if job.compiled is not None
        else ""
    )
    return f"done {seconds:.1f} s after the command started{compiling}"


def _summing(waits: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return seconds per rank: communication that the backward pass did not hide, and waiting for slower ranks.


    The slowest rank never waits for others, so the minimum wait over ranks bounds the communication time.
    """
    if len(waits) == 1:
        return {}
    sending = min(wait for _, wait in waits)
    return {"sending": sending, "rank_wait": sum(wait for _, wait in waits) / len(waits) - sending}


def _waits_row(waits: Sequence[tuple[float, float]]) -> str:
    whole = sum(work + wait for work, wait in waits) / len(waits)
    seconds = _summing(waits)
    if not seconds or not whole:
        return ""
    return (
        f"{seconds['sending'] / whole:.1%} of step time in communication that the backward pass did not hide, "
        f"{seconds['rank_wait'] / whole:.1%} waiting for slower processes"
    )
