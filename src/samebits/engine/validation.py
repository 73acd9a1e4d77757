"""Validation of a job: the metrics of its current weights, and a trial of the recipe's metric before training.

The trial finds faults that would show after the first epoch otherwise.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from samebits.cluster import codec, collectives
from samebits.data.collation import describe
from samebits.data.keyed import keys
from samebits.data.loader import Loader
from samebits.data.samples import Batch, Samples, groups_of
from samebits.data.seeding import seed_between, seeded
from samebits.engine.evaluate import evaluate, evaluating, no_metric, options_of
from samebits.engine.forward import check_terms
from samebits.engine.job import Job
from samebits.errors import ConfigError, SamebitsError, is_out_of_memory
from samebits.frames import error_line
from samebits.metrics.early_stop import Patience, metric_of
from samebits.metrics.eval_sets import with_set
from samebits.metrics.metric import Metric
from samebits.provenance.statement import Evaluation, add_evaluation

LOGGER = logging.getLogger("samebits")
NUM_SAMPLES = 4
_BUGS = (AttributeError, ImportError, NameError, TypeError)


def validate(job: Job, stop_now: Callable[[], bool] = lambda: False) -> tuple[dict[str, float], Any, bool]:
    """Evaluate the job's weights on its validation sets, and note the result in its progress. Called on all ranks.

    `stop_now`: whether a stop was requested, on any rank.

    Returns:
        The metrics by name; the recipe's metric of `eval_data`, merged over the ranks on rank 0; and whether this is
        the best validation so far.

    Raises:
        ConfigError: The validation has no metric of the name in `Parts.monitor`.
        EvaluationStopped: A stop was requested.
    """
    config, progress = job.config, job.progress
    with job.evaluated_weights():
        metrics, metric = evaluate_set(job, job.eval_data, stop_now)
        for name, samples in job.eval_sets.items():
            metrics |= with_set(name, evaluate_set(job, samples, stop_now)[0])
    name, better = job.parts.monitor
    if name not in metrics:
        raise no_metric(name, metrics)
    if progress.evaluations or not progress.evaluated_step:  # not in runs whose first checkpoints had no such hash
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        progress.evaluations = add_evaluation(progress.evaluations, Evaluation.of(progress.step, finite))
    progress.metrics, progress.evaluated_step = metrics, progress.step
    value, sign = metrics[name], 1.0 if better == "max" else -1.0
    # NaN is never the best: every comparison with it is false, so no later value could replace it.
    is_best = not math.isnan(value) and (progress.best is None or sign * value > sign * progress.best["value"])
    if is_best:
        progress.best = {"step": progress.step, "metric": name, "value": value, "better": better}
    if config.stop_early.patience is not None:
        _note_for_early_stop(job, metrics)
    return metrics, metric, is_best


def evaluate_set(
    job: Job, samples: Samples, stop_now: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], Metric]:
    """Evaluate the job's model, with the weights that it has now; see `evaluate`. Called on all ranks."""
    options, is_sharded = options_of(job.parts, job.config), job.replica.is_sharded
    if is_sharded and job.parts.infer is not None:
        # `infer` may call the model once per image, and all ranks must call a sharded model equally often.
        options["batch_size"] = 1
    return evaluate(job.model, samples, job.world, **options, stop=stop_now, even=is_sharded)


def _note_for_early_stop(job: Job, metrics: Mapping[str, float]) -> None:
    config, progress = job.config.stop_early, job.progress
    name, sign = metric_of(config, job.parts.monitor)
    if name not in metrics:
        raise no_metric(name, metrics, "stop_early.metric")
    patience = Patience(progress.stop_best, progress.num_stale).after(metrics[name], sign, config)
    progress.stop_best, progress.num_stale = patience.best, patience.num_stale
    # At the last step the run is complete anyway, and must not be reported as stopped early.
    progress.has_stopped_early = patience.is_over(config) and progress.step < job.num_steps


def try_metric(job: Job) -> None:
    """Evaluate a few samples with the recipe's metric, on rank 0. Nothing of the job changes.

    Only for recipe files, because tests hold the metrics of Samebits's own recipes. Left out if the model is sharded,
    because rank 0 alone cannot run it.

    Raises:
        ConfigError: The metric, `Parts.infer` or the loss failed, or there is no metric of the name in
            `Parts.monitor`. On all ranks.
    """
    if job.config.recipe.endswith(".py") and not job.replica.is_sharded:
        collectives.run_on_rank0(job.world, lambda: _try(job))


def _try(job: Job) -> None:
    device, parts = job.world.device, job.parts
    with (
        seeded(0),
        # A trial must not advance the device's generator, from which the first step draws.
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        job.evaluated_weights(),
        evaluating(job.model),
        torch.inference_mode(),
    ):
        batch = _first_samples(job)
        if batch is None:
            return
        seed_between(device, 0, 0)
        names: list[str] = []
        if parts.infer is not None:
            with _faults_of("the recipe's infer"):
                outputs = parts.infer(job.model, batch.inputs)
        else:
            with _faults_of("the recipe's model", given=f"inputs: {describe(batch.inputs)}"):
                outputs = job.model(batch.inputs)
            with _faults_of("the recipe's loss"):
                terms = parts.loss(outputs, batch)
                check_terms(terms)
                names = ["loss", *terms]
        values = _count(parts.metric, outputs, batch)
    if values is None:
        return
    names += values
    # Each further set has the same metrics.
    names += [full for each in job.eval_sets for full in with_set(each, dict.fromkeys(names, 0.0))]
    monitored = [(parts.monitor[0], "Parts.monitor")]
    if job.config.stop_early.patience is not None:
        monitored.append((metric_of(job.config.stop_early, parts.monitor)[0], "stop_early.metric"))
    for name, where in monitored:
        if name not in names:
            raise no_metric(name, dict.fromkeys(names, 0.0), where)


def _first_samples(job: Job) -> Batch | None:
    """Read the first validation samples of one group; None if that fails, which the first validation reports."""
    samples = job.eval_data
    groups = groups_of(samples)
    of_group = range(len(samples)) if groups is None else (groups == groups[0]).nonzero()[0].tolist()
    indices = torch.tensor(of_group[: min(NUM_SAMPLES, job.config.eval_batch)], dtype=torch.int64).numpy()
    request = (indices, keys(0, 0, indices))
    loader = Loader(
        samples, lambda: iter([request]), job.world.device, num_workers=0, channels_last=job.config.channels_last
    )
    try:
        return loader.batch(*request)
    except SamebitsError:
        raise
    except Exception as error:
        LOGGER.info("the samples of the trial evaluation failed: %s", error)
        return None
    finally:
        loader.close()


def _count(make: Any, outputs: Any, batch: Batch) -> list[str] | None:
    """Count a batch as a validation does, and merge it; return the names of its values, or None without any."""
    counted: Metric = make()
    what = f"the metric {type(counted).__name__}"
    with _faults_of(what):
        counted.add(outputs, batch)
        # Through the codec, as between ranks: a state that cannot
        # be sent is found before training, also on one process.
        state = codec.decode(codec.encode(counted.state()))
        merged: Metric = make()
        merged.merge(state)
        num_samples = merged.num_samples
    if num_samples != len(batch):
        raise ConfigError(
            f"{what} counted {num_samples} samples of {len(batch)}",
            where="Parts.metric",
            fix="Count each sample of a batch once in add, and add up the counts in merge.",
        )
    with _faults_of(what):
        try:
            values = merged.result()
        except _BUGS:
            raise
        except Exception as error:  # such as a correlation, which needs more samples
            LOGGER.info("the metric has no result for %d samples: %s", num_samples, error)
            return None
        # `float` fails for a value that is no number, as the report of a validation would.
        return [name for name, value in values.items() if isinstance(float(value), float)]


@contextmanager
def _faults_of(what: str, given: str | None = None) -> Iterator[None]:
    """Raise an error of a user's code as a ConfigError that names its line."""
    try:
        yield
    except SamebitsError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{what} has failed: {type(error).__name__}: {error}",
            given=given,
            where=error_line(error),
            cause=f"It was tried on {NUM_SAMPLES} validation samples before training.",
            fix="Correct it. SAMEBITS_DEBUG=1 shows the traceback.",
        ) from error
