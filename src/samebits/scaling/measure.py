"""Time some steps of a job in one world: data, communication, waiting for the slowest rank."""

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebits.bench.bench import advance, opened
from samebits.cluster import collectives
from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.data.samples import Batch
from samebits.engine.job import Job

WARM_STEPS = 3
StepFunction = Callable[[Job, Step, "TimedLoader"], object]


@dataclass(frozen=True)
class Timing:
    """Timing of one step."""

    num_samples: int  #: Samples of all ranks.
    step_s: float  #: Duration of the step.
    reading_s: float  #: Waiting for data.
    #: All-reduces that the backward pass does not hide, and waiting for the slowest rank. Unknown for torch's DDP,
    #: which communicates inside the backward pass.
    waiting_s: float


class TimedLoader:
    """A loader that measures how long the training process waits for it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.seconds = 0.0

    def batch(self, *request: object, **options: bool) -> Batch:
        """Return a batch as `Loader.batch` does."""
        started = time.perf_counter()
        batch = self.loader.batch(*request, **options)  # type: ignore[arg-type]  # passed on as it came
        self.seconds += time.perf_counter() - started
        return batch


def measure(source: str, overrides: list[str], is_ddp: bool, num_steps: int) -> dict[str, Any]:
    """Time `num_steps` steps of one process after the warm-up.

    Args:
        is_ddp: Train through torch's DistributedDataParallel instead of Samebits's reducer.

    Returns:
        Samples per second, and the parts of a step in seconds: medians, over all ranks.
    """
    with opened(source, overrides) as bench:
        job = bench.job()
        world = bench.world
        run: StepFunction = _ddp(job) if is_ddp else advance  # type: ignore[assignment]  # a TimedLoader has `batch`
        timings = _timed(job, run, num_steps)
        gathered = collectives.all_gather_object(world, [asdict(timing) for timing in timings])
    # All ranks wait for the slowest one; the parts are means over the ranks. All are medians over the steps:
    # with means, one delayed step could make a part larger than the whole.
    steps = [*zip(*([Timing(**timing) for timing in of_rank] for of_rank in gathered), strict=True)]
    step_s = median(max(timing.step_s for timing in each) for each in steps)
    return {
        "samples_per_s": mean(timing.num_samples for timing in timings) / step_s,
        "step_s": step_s,
        "reading_s": median(mean(timing.reading_s for timing in each) for each in steps),
        "waiting_s": median(mean(timing.waiting_s for timing in each) for each in steps),
        # The slowest rank waits for no other, so the minimum bounds the communication time.
        "sending_s": median(min(timing.waiting_s for timing in each) for each in steps),
        "device": world.device.type,
        "backend": world.backend,
    }


def _timed(job: Job, run: StepFunction, num_steps: int) -> list[Timing]:
    """Time each full step after the warm-up; steps of fewer micro-batches, at the end of an epoch, do not count."""
    loader, steps = job.open_loader()
    timed = TimedLoader(loader)
    timings: list[Timing] = []
    # With samples in groups, such as text lines of several widths, few steps may be full.
    full = -(-min(job.config.global_batch, job.order.num_samples) // job.config.micro_batch)
    activity = job.world.activity
    try:
        for step in steps:
            reading = timed.seconds
            waiting = activity.wait_s
            started = time.perf_counter()
            run(job, step, timed)
            # Kernels run asynchronously: without this, the clock would stop when they are queued.
            if job.world.device.type == "cuda":
                torch.cuda.synchronize(job.world.device)
            seconds = time.perf_counter() - started
            if step.number >= WARM_STEPS and step.num_micro_batches >= full:
                timings.append(
                    Timing(
                        step.num_samples,
                        seconds,
                        timed.seconds - reading,
                        activity.wait_s - waiting,
                    )
                )
            if len(timings) == num_steps:
                break
    finally:
        loader.close()
    return timings


def _ddp(job: Job) -> StepFunction:
    """Return a step through torch's DDP: one all-reduce, with the backward pass of the last micro-batch."""
    # DDP warns about the memory format of one-channel convolutions at each step.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    wrapped: nn.Module = DistributedDataParallel(job.model) if job.world.size > 1 else job.model

    def run(job: Job, step: Step, loader: TimedLoader) -> None:
        if step.num_micro_batches < job.world.size:  # DDP needs all ranks in each step
            # Read and dropped: the loader insists on the order of its requests.
            for micro_batch in step.micro_batches:
                loader.batch(micro_batch.indices, micro_batch.keys)
            return
        job.optimizer.zero_grad()
        for index, micro_batch in enumerate(step.micro_batches):
            batch = loader.batch(micro_batch.indices, micro_batch.keys)
            is_last = index + 1 == len(step.micro_batches)
            with nullcontext() if is_last or job.world.size == 1 else wrapped.no_sync():  # type: ignore[operator]  # DDP, where the world is larger
                terms = job.parts.loss(wrapped(batch.inputs), batch)
                loss = torch.stack([term.float() for term in terms.values()]).sum()
                # DDP divides the sum of the gradients by the number of ranks.
                (loss * micro_batch.weight * job.world.size).backward()
        job.optimizer.step()

    return run
