"""What an exact loop takes over from a torch DataLoader: its dataset, order, collation and workers."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    get_worker_info,
)

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.loader import Loader, Request
from samebits.data.samples import Batch, Samples
from samebits.data.sources.map_style import check_map_style, files_of
from samebits.errors import ConfigError
from samebits.frames import user_level


class CollatedSamples(Samples):
    """A map-style dataset whose batches are what a DataLoader's `collate_fn` returns.

    Args:
        dataset: Has `__len__` and `__getitem__`, or `__getitems__` for a list of indices.
        collate: List of samples -> batch.
        chosen: Indices of the samples to use; None: all.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], chosen: Sequence[int] | None = None
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self.dataset if self._chosen is None else self._chosen)

    @property
    def files(self) -> list[str | PathLike[str]] | None:  # type: ignore[override]  # a property, since the list may be long
        """Paths of the dataset's files, if it lists them."""
        return files_of(self.dataset)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read samples; see `Samples.batch`. Random numbers follow from the first sample's key (`data/loader.py`)."""
        numbers = indices.tolist()
        if self._chosen is not None:
            numbers = [self._chosen[number] for number in numbers]
        # As DataLoader's fetcher does, so that a dataset behaves as it did before.
        if callable(getattr(self.dataset, "__getitems__", None)):
            items = self.dataset.__getitems__(numbers)
        else:
            items = [self.dataset[number] for number in numbers]
        return Batch(self._collate(items), None, torch.from_numpy(indices))


@dataclass(frozen=True)
class LoaderSource:
    """What is taken over from a DataLoader."""

    samples: CollatedSamples  #: The dataset with its collation.
    collate_fn: Callable[[list[Any]], Any]  #: That collation.
    is_shuffled: bool  #: Whether its sampler shuffles.
    drop_last: bool  #: Whether a last incomplete batch is left out.
    batch_size: int  #: Its batch size.
    num_workers: int  #: Its number of workers.
    prefetch: int  #: Batches that each worker reads ahead.
    #: Called in each worker; it finds the dataset in `torch.utils.data.get_worker_info()`.
    worker_init_fn: Callable[[int], None] | None
    timeout_s: float | None  #: Longest wait for a worker's batch, seconds; None: forever.
    #: Its DistributedSampler, whose `set_epoch` the loop may call.
    sampler: DistributedSampler[Any] | None

    def init_worker(self, worker: int) -> None:
        """Call the script's `worker_init_fn` in a DataLoader worker, by its number."""
        if self.worker_init_fn is not None:
            # It looks for the script's dataset there, and torch lets no attribute be set.
            object.__setattr__(get_worker_info(), "dataset", self.samples.dataset)
            self.worker_init_fn(worker)

    def open(
        self,
        requests: Callable[[], Iterator[Request]],
        device: torch.device,
        *,
        num_ranks_here: int = 1,
        num_workers: int | None = None,
    ) -> Loader:
        """Return the batches of some requests, read as the DataLoader reads.

        Args:
            requests: Returns an iterator over all requests, in order.
            num_workers: Number of workers; None: the DataLoader's.
        """
        return Loader(
            self.samples,
            requests,
            device,
            num_workers=self.num_workers if num_workers is None else num_workers,
            prefetch=self.prefetch,
            num_ranks_here=num_ranks_here,
            timeout_s=self.timeout_s,
            worker_init_fn=self.init_worker,
        )


def source_of(data: Any) -> LoaderSource:
    """Take over a DataLoader. It is over a map-style dataset, in order or shuffled.

    Raises:
        ConfigError: It is no DataLoader, its dataset is a stream, or its order can't be repeated at another world size.
    """
    if not isinstance(data, DataLoader):
        raise ConfigError(
            f"data is a {type(data).__name__}",
            allowed="a torch.utils.data.DataLoader",
            fix="Give DataLoader(dataset, batch_size=..., shuffle=True).",
        )
    check_map_style(data.dataset)
    sampler = _sampler_of(data)
    # That of a subset that is shuffled.
    chosen = sampler.indices if type(sampler) is SubsetRandomSampler else None
    samples = CollatedSamples(data.dataset, data.collate_fn, chosen)
    if len(samples) == 0:
        raise ConfigError("the dataset is empty", fix="Give it at least one sample.")
    context = data.multiprocessing_context
    method = context if isinstance(context, str | None) else context.get_start_method()
    if data.num_workers and method not in (None, "fork"):
        raise ConfigError(
            f"the DataLoader starts its workers by {method}",
            allowed="multiprocessing_context=None or 'fork'",
            cause="Workers are forked: each would otherwise import torch and get the dataset pickled.",
            fix="Leave out multiprocessing_context, or set num_workers=0.",
        )
    if data.batch_sampler is None:
        raise ConfigError(
            "the DataLoader has no batch_size",
            cause="Its dataset returns whole batches, which cannot be cut into micro-batches of samples.",
            fix="Give DataLoader(dataset, batch_size=...) a dataset whose __getitem__ returns one sample.",
        )
    is_shuffled, distributed = order_of_sampler(data)
    batches = data.batch_sampler if isinstance(data.batch_sampler, BatchSampler) else data
    return LoaderSource(
        samples,
        data.collate_fn,
        is_shuffled,
        batches.drop_last,
        batches.batch_size or 1,
        data.num_workers,
        data.prefetch_factor or 2,
        data.worker_init_fn,
        data.timeout or None,
        distributed,
    )


def warn_of_seed(data: DataLoader[Any], seed: int) -> None:
    """Warn of a seed of the script for the order of a DataLoader, which has no effect."""
    sampler = _sampler_of(data)
    if getattr(sampler, "generator", None) is not None or getattr(sampler, "seed", seed) not in (
        0,
        seed,
    ):
        warnings.warn(
            f"the order of the samples follows from seed={seed} of exact(): a generator= of the DataLoader, or a seed= "
            "of its sampler, has no effect. For another order, give exact(seed=...).",
            stacklevel=3,
        )


def warn_of_share(reader: Any) -> None:
    """Warn of a DataLoader that gives each process a share of its samples, by its iterator."""
    if type(getattr(reader._index_sampler, "sampler", None)) is DistributedSampler:
        warnings.warn(
            "a DataLoader with a DistributedSampler gives each process a share of the samples, and some of them twice "
            "where they do not divide evenly. What is counted in it, such as an accuracy that decides on the best "
            "epoch, depends on the number of processes. Read it by a samebits.EvalLoader and count by its add() and "
            "sums(), or leave out the sampler, so that each process reads all.",
            stacklevel=user_level(sys._getframe()),
        )


def _sampler_of(data: DataLoader[Any]) -> Sampler[Any] | None:
    # With a batch sampler of its own, a DataLoader's `sampler` is a default that it does not use.
    return getattr(data if data.batch_sampler is None else data.batch_sampler, "sampler", None)


def order_of_sampler(data: DataLoader[Any]) -> tuple[bool, DistributedSampler[Any] | None]:
    """Return whether a DataLoader shuffles, and its DistributedSampler."""
    if data.batch_sampler is not None and type(data.batch_sampler) is not BatchSampler:
        raise _unknown(data.batch_sampler)
    sampler = _sampler_of(data)
    if type(sampler) is SubsetRandomSampler:
        return True, None
    if type(sampler) is DistributedSampler:
        return sampler.shuffle, sampler
    if type(sampler) is SequentialSampler:
        return False, None
    # The public `num_samples` is never None: it does not show whether the script has set it.
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True, None
    raise _unknown(sampler)


def _unknown(sampler: object) -> ConfigError:
    return ConfigError(
        f"the sampler {type(sampler).__name__} decides the order itself",
        allowed="shuffle=True, shuffle=False, a SubsetRandomSampler, or a DistributedSampler, which the exact order "
        "replaces",
        cause="Its order, or how it splits samples over ranks, can depend on the number of processes.",
        fix="Write DataLoader(..., shuffle=True) instead of sampler=..., and the choice of an unusual one into the "
        "dataset, as an oversampled list of indices.",
    )
