"""Reads the batches of a process's micro-batches, in order, ahead of time where there are workers.

What is read is a pure function of the request, so the number of workers changes nothing but the time it takes. One
stream runs through all epochs of a run: no stall at their borders.
"""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.cluster.signals import exit_with_parent
from lockstep.cores import num_cores
from lockstep.data.keyed import IntArray, KeyArray, seed_reading
from lockstep.data.order import Order, Place
from lockstep.data.samples import Batch, Samples, with_channels_last
from lockstep.errors import ConfigError, DataError, LockstepError, ReaderLost, no_shared_memory
from lockstep.open_files import is_too_many_files, too_many_files

Request = tuple[IntArray, KeyArray]

MAX_WORKERS = 8  # for each rank, where it is not said how many; more seldom help and each takes memory


class _Reader(Dataset[Batch | LockstepError]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, request: Any) -> Batch | LockstepError:
        try:
            return _batch(self.samples, *request)
        except LockstepError as error:
            # Raised here, it would come out as torch's RuntimeError around a traceback.
            return error


class _Requests(Sampler[Request]):
    def __init__(self, requests: Callable[[], Iterator[Request]]) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[Request]:
        return self.requests()


def read(samples: Samples, indices: IntArray, keys: KeyArray) -> Batch:
    """Read a batch in this process, to the bits that a worker would read.

    A worker has one thread: it is forked, and OpenMP's others do not outlive that. So it is one here too, as sums may
    depend on how many there are.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _batch(samples, indices, keys)
    finally:
        torch.set_num_threads(num_threads)


def _batch(samples: Samples, indices: IntArray, keys: KeyArray) -> Batch:
    # A data set that draws from the global generators draws the same in every process.
    seed_reading(keys)
    return samples.batch(indices, keys)


def choose_num_workers(
    num_workers: int | Literal["auto"], samples: Samples, device: torch.device, *, num_ranks_here: int
) -> int:
    """How many reading processes a rank gets. Changes no result.

    By itself: none for data that lies in memory; for files, the cores of this machine that its ranks leave free. A
    rank on a GPU needs one core for itself and gets at least one worker; one on the CPU needs as many as its threads.

    Args:
        num_workers: What the settings say.
        samples: The data set.
        device: Where the rank computes.
        num_ranks_here: Ranks on this machine.
    """
    if num_workers != "auto":
        return num_workers
    if not getattr(samples, "is_costly", False):
        return 0
    share = num_cores() // num_ranks_here
    own = torch.get_num_threads() if device.type == "cpu" else 1
    least = 0 if device.type == "cpu" else 1
    return max(least, min(MAX_WORKERS, share - own))


def training_requests(order: Order, place: Place, start: int, stop: int) -> Iterator[Request]:
    """What a process reads for the steps [start, stop) of a run."""
    for step in order.steps(place, start=start, stop=stop):
        for micro_batch in step.micro_batches:
            yield micro_batch.indices, micro_batch.keys


def lost_reader(error: RuntimeError) -> DataError | None:
    """The text for a reading process that somebody killed; None where the error is another one.

    torch notices it by a signal, and raises its error wherever the rank happens to be.
    """
    found = re.search(r"DataLoader worker \(pid\D*(\d+)\) (.+)", str(error))
    if found is None:
        return None
    return ReaderLost(
        f"a reading process (pid {found[1]}) was lost: it {found[2].rstrip('. ')}",
        cause="this machine had no memory left (dmesg tells), or somebody killed it",
        fix="fewer of them: loader.num_workers=1, or 0 for none; then go on with --resume auto",
    )


class Loader:
    """Batches for one process, in the order in which they were announced.

    Args:
        samples: The data set.
        requests: Called once for each reader: what will be asked for, in order.
        device: Where batches go.
        num_workers: Reading processes; 0 reads when asked; "auto" as `choose_num_workers` has it.
        prefetch: Batches that each worker reads ahead.
        channels_last: Lay pictures, (N, C, H, W), out with the channels last, in dicts and lists too, for a model that
            has its weights so.
        num_ranks_here: Ranks on this machine, for "auto".

    Attributes:
        num_workers: Reading processes.
        waited_s: Seconds that `batch` has waited for samples so far, or has read them itself.
        num_to_keep: Samples that go into `kept`, from the next on.
        kept: The first of them, as the data set gave them and in the same memory.
    """

    def __init__(
        self,
        samples: Samples,
        requests: Callable[[], Iterator[Request]],
        device: torch.device,
        *,
        num_workers: int | Literal["auto"] = 0,
        prefetch: int = 2,
        channels_last: bool = False,
        num_ranks_here: int = 1,
    ) -> None:
        self._samples, self._device, self._channels_last = samples, device, channels_last
        self.num_workers = choose_num_workers(num_workers, samples, device, num_ranks_here=num_ranks_here)
        self.waited_s = 0.0
        self.num_to_keep, self.kept = 0, list[Batch]()
        self._stream: Iterator[Batch | LockstepError] | None = None
        if self.num_workers:
            loader = DataLoader(
                _Reader(samples),
                batch_size=None,
                sampler=_Requests(requests),
                num_workers=self.num_workers,
                prefetch_factor=prefetch,
                pin_memory=device.type == "cuda",
                worker_init_fn=_begin_worker,
                # A rank's own default is how it was started itself: then each worker would import torch anew, and the
                # data set would have to be picklable.
                multiprocessing_context="fork",
            )
            try:
                # First, as an iterator of torch that is half made prints a traceback when it is taken apart.
                multiprocessing.get_context("fork").Lock()
                self._stream = iter(loader)
            except OSError as error:
                if error.filename is not None:
                    raise
                if is_too_many_files(error):
                    raise too_many_files() from error
                raise no_shared_memory(error) from error

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """The next batch that was announced, on the device.

        Raises:
            LockstepError: The data set's own, whichever process read.
            ConfigError: The data set gave other samples than these.
        """
        batch = self.raw(indices, keys).to(self._device)
        finish = getattr(self._samples, "finish", None)
        if finish is not None:
            seed_reading(keys)  # the batch may come from another process
            batch = finish(batch)
        return replace(batch, inputs=with_channels_last(batch.inputs)) if self._channels_last else batch

    def raw(self, indices: IntArray, keys: KeyArray) -> Batch:
        """The next batch that was announced, as the data set gave it.

        Raises:
            LockstepError: The data set's own, whichever process read.
            RuntimeError: The data set gave other samples than these.
        """
        began = time.perf_counter()
        batch = read(self._samples, indices, keys) if self._stream is None else next(self._stream)
        self.waited_s += time.perf_counter() - began
        if isinstance(batch, LockstepError):
            raise batch
        if not isinstance(batch, Batch):
            raise ConfigError(
                f"batch() of the recipe's data set gave a {type(batch).__name__}, not a Batch",
                fix="return Batch(inputs, targets, torch.from_numpy(indices))",
            )
        if not np.array_equal(batch.indices.numpy(), indices):
            raise ConfigError(
                "batch() of the recipe's data set gave other samples than it was asked for",
                given=f"{len(batch)}: {batch.indices[:4].tolist()} …",
                allowed=f"{len(indices)}: {indices[:4].tolist()} …, in this order",
                fix="return Batch(inputs, targets, torch.from_numpy(indices))",
            )
        if self.num_to_keep > 0:
            self.kept.append(batch.head(self.num_to_keep))
            self.num_to_keep -= len(self.kept[-1])
        return batch

    def close(self) -> None:
        """End the workers."""
        workers = list(getattr(self._stream, "_workers", ()))
        self._stream = None  # asks them, and waits for some seconds
        for worker in workers:
            if worker.is_alive():
                worker.kill()


def _begin_worker(worker: int) -> None:
    torch.set_num_threads(1)  # as read() has it
    # Signals are the rank's business: it ends its workers, and they end by themselves when it is gone.
    # Some send them to a rank's whole process group, or to all processes of a job.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker has the rank's open files, the run folder's lock among them.
    exit_with_parent()
