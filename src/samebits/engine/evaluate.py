"""Evaluation: each sample of a dataset once, with metrics that are equal in every digit at any world size; and the
validation of a job, with a trial of its metric before training.
"""

import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.division import Batches
from samebits.data.keyed import keys
from samebits.data.loader import Loader, Request
from samebits.data.samples import Batch, Samples, describe, groups_of
from samebits.data.seeding import seed_between, seeded
from samebits.engine.forward import check_terms
from samebits.engine.job import Job
from samebits.engine.parts import Parts
from samebits.errors import ConfigError, DataError, SamebitsError, TrainError, is_out_of_memory
from samebits.frames import error_line
from samebits.metrics.early_stop import Patience, metric_of
from samebits.metrics.eval_sets import with_set
from samebits.metrics.metric import Metric
from samebits.provenance.record import Evaluation, add_evaluation
from samebits.provenance.self_check import buffers_of

Loss = Callable[[Any, Batch], Mapping[str, Tensor]]
Infer = Callable[[nn.Module, Any], Any]
ProgressCallback = Callable[[int, int], None]


class EvaluationStopped(Exception):
    """A stop was requested before all samples were evaluated."""


def evaluate(
    model: nn.Module,
    samples: Samples,
    world: World,
    *,
    loss: Loss,
    infer: Infer | None = None,
    metric: Callable[[], Metric],
    batch_size: int,
    num_workers: int | Literal["auto"] = 0,
    channels_last: bool = False,
    progress: ProgressCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, float], Metric]:
    """Run a model over a whole dataset.

    The dataset is cut into batches of `batch_size`, groups separately, regardless of the world. Rank r takes every W-th
    batch. So each forward pass has the same samples, shape and random numbers at any world size, and all counts and
    sums are equal. The model's state is restored at the end.

    Args:
        model: The model, on the world's device.
        samples: The dataset.
        world: The world.
        loss: (outputs, batch) -> named terms, each the mean over the batch's samples, 0-d.
        infer: (model, inputs) -> outputs, instead of calling the model. The evaluation then reports no loss.
        metric: Creates an empty metric.
        batch_size: Number of samples of one forward pass.
        num_workers: DataLoader workers per rank.
        channels_last: Whether to lay out images `(N, C, H, W)` channels last, as the model's weights.
        progress: Called with (batches done, batches) of this rank.
        stop: Whether to stop early; called before each batch. If one rank stops, the others do so after their last
            batch.

    Returns:
        The metrics by name, equal on all ranks: `loss` and its named terms (if there is a loss) as means over samples,
        then those of `metric`; a loss wins if both have one name. And the metric, merged on rank 0, with its own counts
        on the other ranks.

    Raises:
        DataError: The dataset is empty.
        TrainError: The metric failed while merging, or did not count each sample once. On all ranks.
        EvaluationStopped: A rank stopped early. On all ranks.
    """
    num_samples = len(samples)
    if num_samples == 0:
        raise DataError("the validation set is empty", fix="Give it at least one sample.")
    batches = Batches(num_samples, batch_size, groups_of(samples))
    mine = range(world.rank, len(batches), world.size)

    def requests() -> Iterator[Request]:
        for index in mine:
            indices = batches[index]
            yield indices, keys(0, 0, indices)

    loader = Loader(
        samples,
        requests,
        world.device,
        num_workers=num_workers,
        channels_last=channels_last,
        num_ranks_here=world.num_ranks_here,
    )
    counted = metric()
    is_stopped = False
    sums: dict[str, list[float]] = {}
    with closing(loader), evaluating(model), torch.inference_mode():
        for done, request in enumerate(requests(), start=1):
            if is_stopped := stop():
                break
            world.activity.enter("evaluating")
            batch = loader.batch(*request)
            seed_between(world.device, 0, int(request[0][0]))
            outputs = model(batch.inputs) if infer is None else infer(model, batch.inputs)
            counted.add(outputs, batch)
            for name, term in (loss(outputs, batch) if infer is None else {}).items():
                sums.setdefault(name, []).append(float(term) * len(batch))
            if progress is not None:
                progress(done, len(mine))
    if collectives.any_rank(world, is_stopped):
        raise EvaluationStopped
    return _merge(world, metric(), counted, sums, num_samples)


def options_of(parts: Parts, config: RunConfig) -> dict[str, Any]:
    """Return the keyword arguments with which `evaluate` runs a recipe's model by the settings of a run."""
    return {
        "loss": parts.loss,
        "infer": parts.infer,
        "metric": parts.metric,
        "batch_size": config.eval_batch,
        "num_workers": config.loader.num_workers,
        "channels_last": config.channels_last,
    }


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; at the end, restore each module's mode and the values of its buffers."""
    modes = [(module, module.training) for module in model.modules()]
    restore = buffers_of(model)
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        restore()


def _merge(
    world: World, merged: Metric, counted: Metric, sums: dict[str, list[float]], num_samples: int
) -> tuple[dict[str, float], Metric]:
    # A metric may store much per sample, so its state goes to rank 0 only, and only numbers come back.
    try:
        counts = collectives.gather_object(world, (counted.state(), sums))
    except TypeError as error:
        raise _metric_fault(merged, error) from error

    def all_metrics() -> dict[str, float]:
        assert counts is not None
        try:
            for state, _ in counts:
                merged.merge(state)
            if merged.num_samples != num_samples:
                raise TrainError(
                    f"evaluated {merged.num_samples} samples, the dataset has {num_samples}",
                    cause=f"{type(merged).__name__} loses samples, or counts some twice, in add, state or merge.",
                    fix="Count each sample of a batch once in add, and add up the counts in merge.",
                )
            own = {name: float(value) for name, value in merged.result().items()}
        except SamebitsError:
            raise
        except (
            Exception
        ) as error:  # a bug in a user's metric; the other ranks must not wait for the result
            raise _metric_fault(merged, error) from error
        all_sums: dict[str, list[float]] = {}
        for _, rank_sums in counts:
            for name, values in rank_sums.items():
                all_sums.setdefault(name, []).extend(values)
        terms = {name: _sum(values) / num_samples for name, values in all_sums.items()}
        loss = (
            {"loss": _sum(list(terms.values())), **(terms if len(terms) > 1 else {})}
            if terms
            else {}
        )
        # Twice: at the start for its place in records, at the end because no metric of this name may replace it.
        return {**loss, **own, **loss}

    return collectives.run_on_rank0(world, all_metrics), merged if world.is_main else counted


def no_metric(name: str, metrics: Mapping[str, float], where: str = "Parts.monitor") -> ConfigError:
    """Return the error for a metric that the validation does not have."""
    return ConfigError(
        f"the validation has no metric {name}",
        where=where,
        allowed=", ".join(metrics),
        fix=f"Set {where} to one of these names.",
    )


def _metric_fault(metric: Metric, error: Exception) -> TrainError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TrainError(
        f"the metric {type(metric).__name__} has failed: {type(error).__name__}: {error}",
        where=f"{frame.filename}:{frame.lineno}, in {frame.name}",
        fix="Correct the metric. The traceback is in the run's logs/rank-0.log, or run samebits eval RUN --debug.",
    )


def _sum(values: list[float]) -> float:
    # fsum rounds once, at the end, so the order of the ranks does not matter. It raises an error for infinities.
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


# Validation of a job: the metrics of its current weights, and a trial of the recipe's metric before training.
#
# The trial finds faults that would show after the first epoch otherwise.


LOGGER = logging.getLogger("samebits")
NUM_SAMPLES = 4
_BUGS = (AttributeError, ImportError, NameError, TypeError)


def validate(
    job: Job, stop_now: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], Any, bool]:
    """Evaluate the job's weights on its validation sets, and note the result in its progress. Called on all ranks.

    `stop_now`: whether a stop was requested, on any rank.

    Returns:
        The metrics by name; the recipe's metric of `eval_data`, merged over the ranks on rank 0; and whether this is
        the best validation so far.

    Raises:
        ConfigError: The validation has no metric of the name in `Parts.monitor`.
        EvaluationStopped: A stop was requested.
    """
    config = job.config
    progress = job.progress
    with job.evaluated_weights():
        metrics, metric = evaluate_set(job, job.eval_data, stop_now)
        for name, samples in job.eval_sets.items():
            metrics |= with_set(name, evaluate_set(job, samples, stop_now)[0])
    name, better = job.parts.monitor
    if name not in metrics:
        raise no_metric(name, metrics)
    if (
        progress.evaluations or not progress.evaluated_step
    ):  # not in runs whose first checkpoints had no such hash
        evaluation = Evaluation.of(progress.step, metrics)
        progress.evaluations = add_evaluation(progress.evaluations, evaluation)
    progress.metrics = metrics
    progress.evaluated_step = progress.step
    value = metrics[name]
    sign = 1.0 if better == "max" else -1.0
    # NaN is never the best: every comparison with it is false, so no later value could replace it.
    is_best = not math.isnan(value) and (
        progress.best is None or sign * value > sign * progress.best["value"]
    )
    if is_best:
        progress.best = {"step": progress.step, "metric": name, "value": value, "better": better}
    if config.stop_early.patience is not None:
        _note_for_early_stop(job, metrics)
    return metrics, metric, is_best


def evaluate_set(
    job: Job, samples: Samples, stop_now: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], Metric]:
    """Evaluate the job's model, with the weights that it has now; see `evaluate`. Called on all ranks."""
    options = options_of(job.parts, job.config)
    return evaluate(job.model, samples, job.world, **options, stop=stop_now)


def _note_for_early_stop(job: Job, metrics: Mapping[str, float]) -> None:
    config = job.config.stop_early
    progress = job.progress
    name, sign = metric_of(config, job.parts.monitor)
    if name not in metrics:
        raise no_metric(name, metrics, "stop_early.metric")
    patience = Patience(progress.stop_best, progress.num_stale).after(metrics[name], sign, config)
    progress.stop_best = patience.best
    progress.num_stale = patience.num_stale
    # At the last step the run is complete anyway, and must not be reported as stopped early.
    progress.has_stopped_early = patience.is_over(config) and progress.step < job.num_steps


def try_metric(job: Job) -> None:
    """Evaluate a few samples with the recipe's metric, on rank 0. Nothing of the job changes.

    Only for recipe files, because tests hold the metrics of Samebits's own recipes.

    Raises:
        ConfigError: The metric, `Parts.infer` or the loss failed, or there is no metric of the name in
            `Parts.monitor`. On all ranks.
    """
    if job.config.recipe.endswith(".py"):
        collectives.run_on_rank0(job.world, lambda: _try(job))


def _try(job: Job) -> None:
    device = job.world.device
    parts = job.parts
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
    of_group = (
        range(len(samples)) if groups is None else (groups == groups[0]).nonzero()[0].tolist()
    )
    indices = np.array(of_group[: min(NUM_SAMPLES, job.config.eval_batch)], dtype=np.int64)
    request = (indices, keys(0, 0, indices))
    loader = Loader(
        samples,
        lambda: iter([request]),
        job.world.device,
        num_workers=0,
        channels_last=job.config.channels_last,
    )
    with closing(loader):
        try:
            return loader.batch(*request)
        except SamebitsError:
            raise
        except Exception as error:
            LOGGER.info("the samples of the trial evaluation failed: %s", error)
            return None


def _count(make: Any, outputs: Any, batch: Batch) -> list[str] | None:
    """Count a batch as a validation does, and merge it; return the names of its values, or None without any."""
    counted: Metric = make()
    what = f"the metric {type(counted).__name__}"
    with _faults_of(what):
        counted.add(outputs, batch)
        # Through the codec, as between ranks: a state that cannot
        # be sent is found before training, also on one process.
        state = collectives.decode(collectives.encode(counted.state()))
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
