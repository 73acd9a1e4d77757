"""Loading of the batches of a rank's micro-batches, in order, ahead of time with DataLoader workers.

A batch is a pure function of its request (sample indices and keys), so the number of workers changes only the speed.
The plans of the steps are computed once: the loader reads ahead in them, and the loop follows (`Job.open_loader`). A
batch whose indices differ from the expected ones is an error. One stream runs through all epochs, so there is no stall
between them. With two workers:

    requests (Order)   r0  r1  r2  r3  r4 ...
    worker 0           read b0 | read b2 | read b4 ...        torch hands requests out in turn,
    worker 1           read b1 | read b3 | ...                and returns batches in the order of the requests
    rank               batch(r0) step batch(r1) step batch(r2) ...   to(device), finish

Workers are forked, and reading happens under one thread and seeded generators (`read`), in a worker as in the rank.
"""

import gc
import multiprocessing
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from samebits.cluster.signals import exit_with_parent
from samebits.cores import num_cores
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.order import Step
from samebits.data.samples import Batch, SampleSource, as_samples, digest_of, with_channels_last
from samebits.data.seeding import seed_reading
from samebits.errors import ConfigError, DataError, ReaderLost, SamebitsError, no_shared_memory
from samebits.open_files import is_too_many_files, too_many_files

_DEATH_S = 0.5  # how long the end of a killed worker takes, at most

Request = tuple[IntArray, KeyArray]

MAX_WORKERS = 8  # of a rank, with loader.num_workers=auto: more rarely help, and each takes memory


class _Reader(Dataset[Batch | SamebitsError]):
    def __init__(self, samples: SampleSource) -> None:
        self.samples = samples

    def __getitem__(self, request: Any) -> Batch | SamebitsError:
        try:
            return _batch(self.samples, *request)
        except SamebitsError as error:
            # Returned, not raised: the DataLoader would wrap it in an error whose text is a traceback.
            if error.__cause__ is not None:  # lost on the way to the rank
                error.add_note("".join(traceback.format_exception(error.__cause__)))
            return error


def read(samples: SampleSource, indices: IntArray, keys: KeyArray) -> Batch:
    """Read a batch of the (N,) samples with these (N,) keys in this process, with the same bits as in a worker.

    A forked worker has one thread, since OpenMP's other threads do not survive a fork. The number of threads can change
    the order of sums, so this process uses one thread too.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _batch(samples, indices, keys)
    finally:
        torch.set_num_threads(num_threads)


def _batch(samples: SampleSource, indices: IntArray, keys: KeyArray) -> Batch:
    # A dataset that uses the global generators then draws the same numbers in every process.
    seed_reading(keys)
    return samples.batch(indices, keys)


def choose_num_workers(
    num_workers: int | Literal["auto"],
    samples: SampleSource,
    device: torch.device,
    *,
    num_ranks_here: int,
) -> int:
    """Choose the number of DataLoader workers of a rank. Does not change results.

    "auto": 0 for data in memory; for files, the rank's share of the cores that are free. A rank on a GPU keeps one core
    for itself and has at least one worker; a rank on the CPU keeps as many cores as it has threads.
    """
    if num_workers != "auto":
        return num_workers
    if not as_samples(samples).is_costly:
        return 0
    own, least = (torch.get_num_threads(), 0) if device.type == "cpu" else (1, 1)
    return max(least, min(MAX_WORKERS, num_cores() // num_ranks_here - own))


def requests_of(steps: Iterable[Step]) -> Iterator[Request]:
    """Yield the request of each micro-batch of some steps, in order."""
    for step in steps:
        for micro_batch in step.micro_batches:
            yield micro_batch.indices, micro_batch.keys


def lost_reader(error: BaseException) -> DataError | None:
    """Make the error for a DataLoader worker that was killed; None if the error is another one.

    torch raises it in a SIGCHLD handler, hence anywhere in the rank's code, also while another error is handled.
    """
    match = re.search(r"DataLoader worker \(pid\D*(\d+)\) (.+)", str(error))
    if match is None:
        return None if error.__context__ is None else lost_reader(error.__context__)
    return _reader_lost(match[1], match[2].rstrip(". "))


def _reader_lost(pid: int | str, how: str) -> ReaderLost:
    return ReaderLost(
        f"DataLoader worker (pid {pid}) {how}",
        cause="the machine ran out of memory (see dmesg), or another process killed the worker",
        fix="Set loader.num_workers=1, or 0 for none, and resume with --resume auto.",
    )


class BatchSource(Protocol):
    """What a step reads its micro-batches from: a `Loader`, or what observes one."""

    def batch(self, indices: IntArray, keys: KeyArray, *, again: bool = False) -> Batch:
        """Return the next batch of (N,) samples, with (N,) keys; see `Loader.batch`."""


class Loader:
    """The batches of one rank, in the order of their requests.

    Args:
        requests: Returns an iterator over all requests, in order.
        num_workers: DataLoader workers; 0: read in this process; "auto": see `choose_num_workers`.
        channels_last: Convert (N, C, H, W) inputs to the memory format channels_last, in dicts and lists too.
        timeout_s: Longest wait for a worker's batch, seconds; None: forever.
        worker_init_fn: Called in each worker, with its number.

    Attributes:
        num_workers: DataLoader workers.
        waited_s: Seconds spent so far on waiting for batches, or on reading them in this process.
        num_to_keep: Number of samples still to be stored in `kept`.
        kept: The stored samples, as the dataset returned them and in the same memory.
        digests: If not None, receives a digest of each batch as the dataset returned it.
    """

    def __init__(
        self,
        samples: SampleSource,
        requests: Callable[[], Iterator[Request]],
        device: torch.device,
        *,
        num_workers: int | Literal["auto"] = 0,
        prefetch: int = 2,
        channels_last: bool = False,
        num_ranks_here: int = 1,
        timeout_s: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._samples = as_samples(samples)
        self._device = device
        self._channels_last = channels_last
        self.num_workers = choose_num_workers(
            num_workers, samples, device, num_ranks_here=num_ranks_here
        )
        self._timeout_s = timeout_s
        self.waited_s = 0.0
        self.num_to_keep = 0
        self.kept = list[Batch]()
        self.digests: list[bytes] | None = None
        self._stream: Iterator[Batch | SamebitsError] | None = None
        if self.num_workers:
            loader = DataLoader(
                _Reader(samples),
                batch_size=None,
                sampler=requests(),
                num_workers=self.num_workers,
                prefetch_factor=prefetch,
                timeout=timeout_s or 0,
                pin_memory=device.type == "cuda",
                worker_init_fn=partial(_start_worker, then=worker_init_fn),
                # A rank's own default is forkserver: each worker would import torch, and the dataset be pickled.
                multiprocessing_context="fork",
            )
            try:
                # A lock fails for the same reasons, without the traceback of torch's half-made iterator.
                multiprocessing.get_context("fork").Lock()
                self._stream = iter(loader)
            except OSError as error:
                if error.filename is not None:
                    raise
                if is_too_many_files(error):
                    raise too_many_files() from error
                raise no_shared_memory(error) from error

    def batch(self, indices: IntArray, keys: KeyArray, *, again: bool = False) -> Batch:
        """Return the next batch on the device: its (N,) samples, with (N,) keys.

        Args:
            again: Read the samples of an earlier request again, in this process and outside of the stream.

        Raises:
            SamebitsError: Raised by the dataset, in this process or a worker.
            ConfigError: The dataset returned other samples, or no Batch.
        """
        batch = self.raw(indices, keys, again=again).to(self._device)
        if self._samples.finish is not None:
            seed_reading(keys)  # a worker's generators are not those of this process
            batch = self._samples.finish(batch)
        return (
            replace(batch, inputs=with_channels_last(batch.inputs))
            if self._channels_last
            else batch
        )

    def raw(self, indices: IntArray, keys: KeyArray, *, again: bool = False) -> Batch:
        """Return the next batch, of (N,) samples, as the dataset made it: on the CPU, without `finish`; as `batch`."""
        started = time.perf_counter()
        batch = (
            read(self._samples, indices, keys) if again or self._stream is None else self._next()
        )
        self.waited_s += time.perf_counter() - started
        if isinstance(batch, SamebitsError):
            raise batch
        if not isinstance(batch, Batch):
            raise ConfigError(
                f"batch() of the recipe's dataset returned a {type(batch).__name__}, not a Batch",
                fix="Return Batch(inputs, targets, torch.from_numpy(indices)) from batch().",
            )
        if not np.array_equal(batch.indices.numpy(), indices):
            raise ConfigError(
                "batch() of the recipe's dataset returned other samples than the requested ones",
                given=f"{len(batch)} samples: {batch.indices[:4].tolist()} …",
                allowed=f"{len(indices)} samples: {indices[:4].tolist()} …, in this order",
                fix="Return Batch(inputs, targets, torch.from_numpy(indices)) from batch().",
            )
        if again:
            return batch
        if self.digests is not None:
            self.digests.append(digest_of(batch))
        if self.num_to_keep > 0:
            self.kept.append(batch.head(self.num_to_keep))
            self.num_to_keep -= len(self.kept[-1])
        return batch

    def _next(self) -> Batch | SamebitsError:
        assert self._stream is not None
        try:
            return next(self._stream)
        except (OSError, EOFError):
            # The dataset's own error, or the rest of a batch that a killed worker was sending.
            workers = {worker.sentinel: worker for worker in cast(Any, self._stream)._workers}
            for ended in wait([*workers], _DEATH_S):
                worker = workers[cast(int, ended)]
                worker.join()
                raise _reader_lost(
                    worker.pid, f"was killed by signal {-(worker.exitcode or 0)}"
                ) from None
            raise
        except RuntimeError as error:
            if self._timeout_s is None or "DataLoader timed out" not in str(error):
                raise
            raise DataError(
                f"a DataLoader worker returned no batch for {self._timeout_s:g} s",
                cause="a read that never returns: a network disk, a lock, a download",
                fix=f"If reading is only slow, set watch.hang_timeout_s={3 * self._timeout_s:g}, or the DataLoader's "
                "timeout in a script. num_workers=0 "
                "reads in the training process, where Ctrl-C with SAMEBITS_DEBUG=1 shows the line.",
            ) from None

    def close(self) -> None:
        """Stop the workers."""
        stream: Any = self._stream
        self._stream = None
        if stream is None:
            return
        # Sends the workers a request to exit. Its destructor does the same, but an error's traceback can keep it alive,
        # and torch then takes the kill below for a failure.
        with suppress(RuntimeError):  # torch's report of a killed worker, from a signal handler
            stream._shutdown_workers()
        for worker in stream._workers:
            if worker.is_alive():
                worker.kill()


def _start_worker(worker: int, then: Callable[[int], None] | None) -> None:
    # Garbage of the rank is not this process's to end: a library's object may wait for threads, which no fork has.
    gc.freeze()
    torch.set_num_threads(1)  # as in read()
    # Sent to the whole process group. The rank handles them and stops its workers, which exit if it dies.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Otherwise a forked worker could outlive the rank with its open files, such as the lock of the run folder.
    exit_with_parent()
    if then is not None:
        then(worker)
