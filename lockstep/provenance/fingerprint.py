"""What a run is made of, as short digests: compared between ranks at the start, and with the run's own at a resume.

Gradients are shared, so ranks with other code or data train one model that nobody asked for, and all weights agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.schema import RunConfig
from lockstep.data.groups import groups_of
from lockstep.data.keyed import CHECK, key, keys
from lockstep.data.loader import Loader, Request, choose_num_workers
from lockstep.data.order import MicroBatch, Order, permute
from lockstep.data.samples import Batch, Samples, as_samples
from lockstep.provenance.environment import what_computes
from lockstep.provenance.self_check import check_same_samples, try_micro_batch

NUM_TRAIN, NUM_EVAL = 8, 2  # samples that are read
NUM_TRIED = 3  # samples of the trial micro-batch; batch norm over two values gives plus and minus one
MAX_FILES = 10_000  # whose sizes are looked at: a file server may take 0.1 ms for each
PACKAGE = "code of lockstep"
_ROOT = Path(__file__).resolve().parents[1]
Named = dict[str, str]


@dataclass(frozen=True)
class Fingerprint:
    """Digests and versions, by name.

    Attributes:
        environment: Versions, processor and GPU.
        code: The package's files, and those of a recipe file with the modules that it imported from its folder.
        data: Some samples, read by keys that follow from the seed; sizes of the files, where the dataset knows them.
        trial: What one micro-batch gives on the fresh model. Exact mode only.
    """

    environment: Named = field(default_factory=dict)
    code: Named = field(default_factory=dict)
    data: Named = field(default_factory=dict)
    trial: Named = field(default_factory=dict)

    def to_json(self) -> dict[str, Named]:
        """As plain JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: object) -> Fingerprint:
        """From what a checkpoint holds; what is not there, or is no text, is left out."""
        plain = content if isinstance(content, dict) else {}
        named = {part.name: plain.get(part.name) for part in dataclasses.fields(cls)}
        return cls(
            **{
                name: {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
                for name, found in named.items()
            }
        )


def take_fingerprint(
    config: RunConfig,
    loss: Callable[[Any, Batch], Mapping[str, Tensor]],
    model: nn.Module,
    data: tuple[Samples, Samples],
    device: torch.device,
    *,
    num_ranks_here: int = 1,
    is_restart: bool = False,
) -> Fingerprint:
    """Take a run's fingerprint, and in exact mode see that samples and a micro-batch are the same a second time.

    Args:
        config: The settings.
        loss: The recipe's loss function.
        model: The model on the device, as it was built.
        data: The training and the evaluation samples.
        device: Where the rank computes.
        num_ranks_here: Ranks on this machine.
        is_restart: Nothing is done a second time, as it was when the run began.

    Raises:
        ConfigError: The second time gave something else.
        LockstepError: The data set's own.
    """
    is_exact = config.mode == "exact"
    is_twice = is_exact and not is_restart
    found: Named = {}
    tried: Batch | None = None
    micro_batch = _first_micro_batch(config, data[0]) if is_exact and len(data[0]) else None
    for name, samples, count in (("training", data[0], NUM_TRAIN), ("evaluation", data[1], NUM_EVAL)):
        singles = _chosen(samples, config.seed, count)
        requests = singles * (2 if is_twice else 1)
        more = [(micro_batch.indices, micro_batch.keys)] if micro_batch is not None and samples is data[0] else []
        if not singles:
            continue
        with _reader(samples, [*requests, *more], config, device, num_ranks_here) as loader:
            first = _digests(loader, singles)
            if is_twice:
                check_same_samples(name, first, _digests(loader, singles))
            tried = loader.batch(*more[0]) if more else tried
        found |= {f"{name} sample {index}": digest for index, digest in first.items()}
        if sizes := _sizes(samples):
            found[f"sizes of the {name} files"] = sizes
    trial: Named = {}
    if micro_batch is not None and tried is not None:
        trial = try_micro_batch(model, loss, tried, micro_batch.forward_key, device, twice=is_twice)
    # Last, as the modules of a recipe may import others when they are first used.
    return Fingerprint(what_computes(device), code_digests(config.recipe), found, trial)


def code_digests(recipe: str) -> Named:
    """Digests of the package's files, and of a recipe file with the loaded modules that lie in its folder or below."""
    digests = {PACKAGE: _package_digest()}
    if recipe.endswith(".py"):
        path = Path(recipe)
        for file in sorted({path, *_modules_below(path.parent)}):
            try:
                content = file.read_bytes()
            except OSError:
                continue  # it was removed since it was imported
            digests[f"code of {file.relative_to(path.parent).as_posix()}"] = _short(hashlib.sha256(content))
    return digests


@cache
def _package_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(_ROOT.rglob("*.py")):
        digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return _short(digest)


def _modules_below(folder: Path) -> Iterator[Path]:
    """Files of loaded modules in a folder, without installed packages and Lockstep itself."""
    installed = {Path(sys.prefix), Path(sys.base_prefix), _ROOT}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str):
            continue
        path = Path(name)
        if path.is_relative_to(folder) and not any(path.is_relative_to(place) for place in installed):
            yield path


def _first_micro_batch(config: RunConfig, samples: Samples) -> MicroBatch:
    """The first micro-batch of the run, cut short: a few samples show as much as all."""
    order = Order(len(samples), config.global_batch, config.micro_batch, config.seed, groups_of(samples))
    whole = next(order.steps(_Alone(), stop=1)).micro_batches[0]
    return dataclasses.replace(whole, indices=whole.indices[:NUM_TRIED], keys=whole.keys[:NUM_TRIED])


class _Alone:
    rank, size = 0, 1


def _chosen(samples: Samples, seed: int, count: int) -> list[Request]:
    """Some samples, each in a batch of its own, with the keys of their first epoch; they follow from the seed.

    One by one: samples of different sizes cannot share a batch.
    """
    size = len(samples)
    if not size:
        return []
    indices = permute(np.arange(min(size, count)), size, key(seed, CHECK))
    return [(indices[at : at + 1], keys(seed, 0, indices[at : at + 1])) for at in range(len(indices))]


def _digests(loader: Loader, requests: Sequence[Request]) -> dict[int, str]:
    """A digest for each of the samples that are read next."""
    digests: dict[int, str] = {}
    for request in requests:
        digests |= sample_digests(loader.raw(*request))
    return digests


@contextmanager
def _reader(
    samples: Samples, requests: Sequence[Request], config: RunConfig, device: torch.device, num_ranks_here: int
) -> Iterator[Loader]:
    """A loader for a few reads. Where training reads in workers, this does too.

    A dataset that opens its files at the first read would otherwise hand this process's open files to all workers.
    """
    workers = choose_num_workers(config.loader.num_workers, samples, device, num_ranks_here=num_ranks_here)
    loader = Loader(
        samples, lambda: iter(requests), device, num_workers=min(1, workers), channels_last=config.channels_last
    )
    try:
        yield loader
    finally:
        loader.close()


def sample_digests(batch: Batch) -> dict[int, str]:
    """A digest for each sample of a batch, by its index.

    What belongs to no single sample counts for each of them.
    """
    indices = batch.indices.tolist()
    digests = {}
    for row, index in enumerate(indices):
        digest = hashlib.sha256()
        for part in (batch.inputs, batch.targets):
            _feed(digest.update, part, row, len(indices))
        digests[index] = _short(digest)
    return digests


def _feed(update: Callable[[bytes], object], value: Any, row: int | None, count: int) -> None:
    """Feed what belongs to one sample of a batch into a digest."""
    if isinstance(value, Tensor):
        if row is not None and value.dim() and len(value) == count:
            value = value[row]
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        if row is not None and value.ndim and len(value) == count:
            value = value[row]
        update(f"{value.dtype} {value.shape}".encode())
        update(value.tobytes() if value.dtype != object else repr(value.tolist()).encode())
    elif isinstance(value, dict):
        for name, item in value.items():
            update(f"{name}:".encode())
            _feed(update, item, row, count)
    elif isinstance(value, list | tuple):
        # One item a sample, or fields of which each has one row a sample.
        has_rows = all(isinstance(item, Tensor) and item.dim() and len(item) == count for item in value)
        if row is not None and len(value) == count and not has_rows:
            _feed(update, value[row], None, count)
            return
        for item in value:
            update(b",")
            _feed(update, item, row, count)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            _feed(update, getattr(value, part.name), row, count)
    elif isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        # The data may lie elsewhere on each machine.
        update(os.fsencode(os.path.basename(text) if os.path.isabs(text) else text))
    elif value is None or isinstance(value, bool | int | float | complex | bytes):
        update(repr(value).encode())
    else:
        update(type(value).__name__.encode())


def _sizes(samples: Samples) -> str | None:
    """A digest of the names and sizes of a dataset's files, as far as it has `files`; of very many, of some."""
    files = as_samples(samples).files
    if files is None or not len(files):
        return None
    digest = hashlib.sha256(str(len(files)).encode())
    for place in range(0, len(files), -(-len(files) // MAX_FILES)):
        path = files[place]
        if not isinstance(path, str | os.PathLike):
            return None  # it is something else that the dataset calls so
        try:
            size = os.stat(path).st_size
        except OSError:
            size = -1
        digest.update(os.fsencode(f"{os.path.basename(path)} {size}\n"))
    return _short(digest)


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
