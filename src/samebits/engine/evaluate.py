"""Evaluation: each sample of a dataset once, with metrics that are equal in every digit at any world size."""

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.groups import Batches
from samebits.data.keyed import keys
from samebits.data.loader import Loader, Request
from samebits.data.samples import Batch, Samples, groups_of
from samebits.data.seeding import seed_between
from samebits.engine.parts import Parts
from samebits.errors import ConfigError, DataError, SamebitsError, TrainError
from samebits.metrics.metric import Metric

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
    even: bool = False,
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
        even: All ranks make the same number of passes, because they cannot run the model independently (fsdp). A rank
            without a batch repeats the first one and ignores the result. `infer` must call the model equally often for
            each batch.

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
    repeated = [0] if even and world.rank >= len(batches) % world.size > 0 else []

    def requests() -> Iterator[Request]:
        for index in [*mine, *repeated]:
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
    counted, is_stopped = metric(), False
    sums: dict[str, list[float]] = {}
    try:
        with evaluating(model), torch.inference_mode():
            for done, request in enumerate(requests(), start=1):
                if is_stopped := collectives.any_rank(world, stop()) if even else stop():
                    break
                world.activity.enter("evaluating")
                batch = loader.batch(*request)
                world.activity.enter("evaluating", waits=even)
                seed_between(world.device, 0, int(request[0][0]))
                outputs = model(batch.inputs) if infer is None else infer(model, batch.inputs)
                if done > len(mine):
                    break
                counted.add(outputs, batch)
                for name, term in (loss(outputs, batch) if infer is None else {}).items():
                    sums.setdefault(name, []).append(float(term) * len(batch))
                if progress is not None:
                    progress(done, len(mine))
    finally:
        loader.close()
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
    # A model may count or collect values in a forward pass, different ones on each rank.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                # A forward pass may have bound the name to another
                # tensor. References to the original one must stay valid.
                setattr(module, name, buffer.copy_(value))


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
        except Exception as error:  # a bug in a user's metric; the other ranks must not wait for the result
            raise _metric_fault(merged, error) from error
        all_sums: dict[str, list[float]] = {}
        for _, rank_sums in counts:
            for name, values in rank_sums.items():
                all_sums.setdefault(name, []).extend(values)
        terms = {name: _sum(values) / num_samples for name, values in all_sums.items()}
        loss = {"loss": _sum(list(terms.values())), **(terms if len(terms) > 1 else {})} if terms else {}
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
