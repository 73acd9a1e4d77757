"""Validation of a job: the metrics of its current weights, and whether they are the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.data.samples import Samples
from lockstep.engine.evaluate import evaluate, no_metric
from lockstep.engine.job import Job
from lockstep.metrics.early_stop import Patience, metric_of
from lockstep.metrics.eval_sets import with_set
from lockstep.metrics.metric import Metric


def validate(job: Job, stop_now: Callable[[], bool] = lambda: False) -> tuple[dict[str, float], Any, bool]:
    """Evaluate the job's weights on its validation sets, and note the result in its progress. Called on all ranks.

    Args:
        job: The run; its progress changes.
        stop_now: Whether a stop was requested, on any rank.

    Returns:
        The metrics by name; the recipe's metric of `eval_data`, merged over the ranks on rank 0; and whether this is
        the best validation so far.

    Raises:
        ConfigError: The validation has no metric of the name in `Parts.monitor`.
        EvaluationStopped: A stop was requested.
    """
    config, progress = job.config, job.progress
    with job.evaluated_weights():
        metrics, metric = _evaluate(job, job.eval_data, stop_now)
        for name, samples in job.eval_sets.items():
            metrics |= with_set(name, _evaluate(job, samples, stop_now)[0])
    name, better = job.parts.monitor
    if name not in metrics:
        raise no_metric(name, metrics)
    progress.metrics, progress.evaluated_step = metrics, progress.step
    value, sign = metrics[name], 1.0 if better == "max" else -1.0
    # NaN is never the best: every comparison with it is false, so no later value could replace it.
    is_best = not math.isnan(value) and (progress.best is None or sign * value > sign * progress.best["value"])
    if is_best:
        progress.best = {"step": progress.step, "metric": name, "value": value}
    if config.stop_early.patience is not None:
        _note_for_early_stop(job, metrics)
    return metrics, metric, is_best


def _evaluate(job: Job, samples: Samples, stop_now: Callable[[], bool]) -> tuple[dict[str, float], Metric]:
    config = job.config
    return evaluate(
        job.model,
        samples,
        job.world,
        loss=job.parts.loss,
        infer=job.parts.infer,
        metric=job.parts.metric,
        # `infer` may call the model once per image, and all ranks must call a sharded model equally often.
        batch_size=1 if job.replica.is_sharded and job.parts.infer is not None else config.eval_batch,
        num_workers=config.loader.num_workers,
        channels_last=config.channels_last,
        stop=stop_now,
        even=job.replica.is_sharded,
    )


def _note_for_early_stop(job: Job, metrics: Mapping[str, float]) -> None:
    config, progress = job.config.stop_early, job.progress
    name, sign = metric_of(config, job.parts.monitor)
    if name not in metrics:
        raise no_metric(name, metrics, "stop_early.metric")
    patience = Patience(progress.stop_best, progress.num_stale).after(metrics[name], sign, config)
    progress.stop_best, progress.num_stale = patience.best, patience.num_stale
    progress.has_stopped_early = patience.is_over(config) and progress.step < job.num_steps
