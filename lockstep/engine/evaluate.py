"""Every sample of the evaluation set once, at any world size, and the same digits of it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.data.groups import Batches, groups_of
from lockstep.data.keyed import FORWARD, key, keys, seed_forward
from lockstep.data.loader import Loader, Request
from lockstep.data.samples import Batch, Samples
from lockstep.errors import DataError, LockstepError, TrainError
from lockstep.metrics.metric import Metric

Loss = Callable[[Any, Batch], Mapping[str, Tensor]]
Infer = Callable[[nn.Module, Any], Any]
Progress = Callable[[int, int], None]


class EvaluationStopped(Exception):
    """Somebody asked for a stop, and not every sample was looked at."""


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
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    even: bool = False,
) -> tuple[dict[str, float], Metric]:
    """Run the model over a whole data set.

    The set is cut into batches of `batch_size`, groups apart, whatever the world; rank r takes every W-th of them. So
    each forward pass has the same samples, shape and random numbers at any world size, and every count and sum comes
    out the same. The model is left as it was.

    Args:
        model: On the world's device; in evaluation mode only while this runs.
        samples: What to evaluate on.
        world: The ranks.
        loss: (outputs, batch) -> named terms, each a mean over the batch's samples.
        infer: (model, inputs) -> outputs, in place of calling the model; then there is no loss.
        metric: Makes an empty metric.
        batch_size: Samples of one forward pass.
        num_workers: Reading processes for each rank.
        channels_last: Lay pictures out as the model's weights are.
        progress: Called with (batches done, batches) of this rank.
        stop: Whether to leave off; asked before each batch. One rank that does is enough, the others learn of it as
            they come to the end of theirs.
        even: The ranks can't pass through the model without each other: all make the same number of passes, and one
            that has no batch left repeats the first one, which counts for nothing. `infer` has to call the model
            equally often for each batch.

    Returns:
        The figures by name, with `loss` and each named term of it (if there is one) as the mean over samples, equal on
        all ranks, then the metric's own; and the metric, on rank 0 merged, elsewhere with this rank's own counts. Of
        two figures of one name the loss's counts.

    Raises:
        DataError: The data set is empty.
        TrainError: The metric has failed as it was merged, or has not counted every sample once. On all ranks.
        EvaluationStopped: On all ranks, if one has left off.
    """
    num_samples = len(samples)
    if num_samples == 0:
        raise DataError("the evaluation set is empty", fix="give it at least one sample")
    batches = Batches(num_samples, batch_size, groups_of(samples))
    mine = range(world.rank, len(batches), world.size)
    repeated = [0] if even and world.rank >= len(batches) % world.size > 0 else []

    def requests() -> Iterator[Request]:
        for place in [*mine, *repeated]:
            indices = batches[place]
            yield indices, keys(0, 0, indices)

    loader = Loader(
        samples,
        requests,
        world.device,
        num_workers=num_workers,
        channels_last=channels_last,
        num_ranks_here=-(-world.size // world.num_hosts),
    )
    counted, is_stopped = metric(), False
    sums: dict[str, list[float]] = {}
    try:
        # A sharded model's own bookkeeping does not take inference mode.
        with _evaluating(model), torch.no_grad() if even else torch.inference_mode():
            for done, request in enumerate(requests(), start=1):
                if is_stopped := any(collectives.all_gather_object(world, stop())) if even else stop():
                    break
                world.activity.enter("evaluating")
                batch = loader.batch(*request)
                world.activity.enter("evaluating", waits=even)
                seed_forward(key(0, FORWARD, int(request[0][0])), world.device)
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
    if any(collectives.all_gather_object(world, is_stopped)):
        raise EvaluationStopped
    return _merge(world, metric(), counted, sums, num_samples)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; at the end each module gets its own mode and the values of its buffers back."""
    modes = [(module, module.training) for module in model.modules()]
    # A model may count or collect in a forward pass, on each rank something else.
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
                setattr(module, name, buffer.copy_(value))


def _merge(
    world: World, merged: Metric, counted: Metric, sums: dict[str, list[float]], num_samples: int
) -> tuple[dict[str, float], Metric]:
    # A metric may keep much of each sample: it goes to rank 0 alone, and only figures come back.
    try:
        counts = collectives.gather_object(world, (counted.state(), sums))
    except TypeError as error:
        raise _metric_fault(merged, error) from error

    def own_figures() -> dict[str, float]:
        assert counts is not None
        for state, _ in counts:
            merged.merge(state)
        if merged.num_samples != num_samples:
            raise TrainError(
                f"evaluated {merged.num_samples} samples, the data set has {num_samples}",
                cause=f"{type(merged).__name__} loses some, or counts some twice, in add, state or merge",
            )
        return {name: float(value) for name, value in merged.result().items()}

    def figures() -> dict[str, float]:
        assert counts is not None
        try:
            own = own_figures()
        except LockstepError:
            raise
        except Exception as error:  # a fault in a person's own metric, say: the others must not wait for the figures
            raise _metric_fault(merged, error) from error
        all_sums: dict[str, list[float]] = {}
        for _, rank_sums in counts:
            for name, values in rank_sums.items():
                all_sums.setdefault(name, []).extend(values)
        terms = {name: _sum(values) / num_samples for name, values in all_sums.items()}
        loss = {"loss": _sum(list(terms.values())), **(terms if len(terms) > 1 else {})} if terms else {}
        return {**loss, **own, **loss}

    return collectives.run_on_rank0(world, figures), merged if world.is_main else counted


def _metric_fault(metric: Metric, error: Exception) -> TrainError:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return TrainError(
        f"the metric {type(metric).__name__} has failed: {type(error).__name__}: {error}",
        where=f"{place.filename}:{place.lineno}, in {place.name}",
        fix="mend it; the traceback is in the run's logs/rank-0.log, or: lockstep eval RUN --debug",
    )


def _sum(values: list[float]) -> float:
    # fsum rounds once, at the end, so the order in which ranks come in does not matter. It refuses what has no sum.
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
