"""Fingerprints of a run: digests of code, data and environment, compared between ranks and at a resume.

Why: gradients are shared, so ranks with different code or data still agree on all weights. They would train a model of
neither, and no later check could see it.

    take_fingerprint                    on each rank, before the first step
      read 8 + 2 samples, twice      -> data     in exact mode, the second reading must be equal (`self_check`)
      run one micro-batch, twice     -> trial    exact mode only; as above, for loss, gradients and buffers
      hash loaded source files       -> code     last, since the first use of a recipe may import more modules
      versions, kernels, processor   -> environment
    check_ranks_agree                   all ranks compare it with rank 0's (`same_run`)
    check_unchanged                     at a resume, with the checkpoint's (`resumed`)
"""

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

from samebits.config.schema import RunConfig
from samebits.data.digests import sample_digests, short_digest
from samebits.data.keyed import CHECK, key, keys
from samebits.data.loader import Loader, Request, choose_num_workers
from samebits.data.micro_batches import Alone
from samebits.data.order import MicroBatch, Order, permute
from samebits.data.samples import Batch, Samples, as_samples, groups_of
from samebits.provenance.environment import describe_kernels
from samebits.provenance.self_check import check_same_samples, try_micro_batch

NUM_TRAIN, NUM_EVAL = 8, 2  # number of samples that are read
NUM_TRIED = 3  # samples of the trial micro-batch; batch norm over two values returns plus and minus one for any input
MAX_FILES = 10_000  # number of files whose size is read: a file server may take 0.1 ms for each
PACKAGE = "code of samebits"
_ROOT = Path(__file__).resolve().parents[1]
Named = dict[str, str]


@dataclass(frozen=True)
class Fingerprint:
    """Digests and versions, by name."""

    environment: Named = field(default_factory=dict)  #: Versions, processor and GPU.
    #: Source files of the package, and of a recipe file with the modules that it imported from its folder.
    code: Named = field(default_factory=dict)
    #: A few samples, chosen and read by keys from the seed; sizes of the files, if the dataset lists them.
    data: Named = field(default_factory=dict)
    #: Initial weights, loss and gradients of one micro-batch on the fresh model. Exact mode only.
    trial: Named = field(default_factory=dict)

    def to_json(self) -> dict[str, Named]:
        """Return the fingerprint as plain JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: object) -> "Fingerprint":
        """Read the fingerprint in a checkpoint; parts that are missing or not text are left out."""
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
    is_sharded: bool = False,
) -> Fingerprint:
    """Take a run's fingerprint. In exact mode, check that samples and a micro-batch are the same a second time.

    Args:
        config, data: The settings; the training and the validation samples.
        loss: The recipe's loss function; it returns named 0-d tensors.
        model, device, num_ranks_here: The fresh model, on the rank's device; number of ranks on this machine.
        is_restart: Skip the second pass, which ran when the run started.
        is_sharded: Skip the model's passes, since no process holds all gradients of a sharded model.

    Raises:
        ConfigError: The second pass differs.
        SamebitsError: Raised by the dataset.
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
        if sizes := digest_of_sizes(samples):
            found[f"sizes of the {name} files"] = sizes
    trial: Named = {}
    if micro_batch is not None and tried is not None and not is_sharded:  # its gradients might not fit
        trial = try_micro_batch(model, loss, tried, micro_batch.forward_key, device, twice=is_twice)
    # Last: a recipe's modules may import others when they are first used.
    return Fingerprint(describe_kernels(device, config.kernels), code_digests(config.recipe), found, trial)


def code_digests(recipe: str) -> Named:
    """Return digests of the package's files, and of a recipe file with the loaded modules in or below its folder."""
    digests = {PACKAGE: _package_digest()}
    if recipe.endswith(".py"):
        path = Path(recipe)
        for file in sorted({path, *_modules_below(path.parent)}):
            try:
                content = file.read_bytes()
            except OSError:
                continue  # the file was removed after its import
            name = file.relative_to(path.parent).as_posix()
            digests[f"code of {name}"] = short_digest(hashlib.sha256(content).digest())
    return digests


@cache  # once per process: it reads every file of the package
def _package_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(_ROOT.rglob("*.py")):
        digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return short_digest(digest.digest())


def _modules_below(folder: Path) -> Iterator[Path]:
    """Yield the files of loaded modules in a folder, without installed packages and Samebits itself."""
    installed = {Path(sys.prefix), Path(sys.base_prefix), _ROOT}
    # Compared as text first, since thousands of modules are loaded.
    start = "" if folder == Path() else os.path.join(folder, "")
    # A copy of the list: reading an attribute of a lazy module may import others.
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.startswith(start):
            continue
        path = Path(name)
        if path.is_relative_to(folder) and not any(path.is_relative_to(each) for each in installed):
            yield path


def _first_micro_batch(config: RunConfig, samples: Samples) -> MicroBatch:
    """Return the run's first micro-batch, truncated: a few samples show as much as all of them."""
    order = Order(len(samples), config.global_batch, config.micro_batch, config.seed, groups_of(samples))
    # The first micro-batch is the same in every world.
    whole = next(order.steps(Alone(), stop=1)).micro_batches[0]
    return dataclasses.replace(whole, indices=whole.indices[:NUM_TRIED], keys=whole.keys[:NUM_TRIED])


def _chosen(samples: Samples, seed: int, count: int) -> list[Request]:
    """Choose samples by the seed, each as a request of its own, with the keys of their first epoch.

    One per request, because samples of different sizes cannot share a batch.
    """
    size = len(samples)
    if not size:
        return []
    indices = permute(np.arange(min(size, count)), size, key(seed, CHECK))
    return [(indices[at : at + 1], keys(seed, 0, indices[at : at + 1])) for at in range(len(indices))]


def _digests(loader: Loader, requests: Sequence[Request]) -> dict[int, str]:
    """Read samples and return the digest of each."""
    digests: dict[int, str] = {}
    for request in requests:
        digests |= sample_digests(loader.raw(*request))
    return digests


@contextmanager
def _reader(
    samples: Samples, requests: Sequence[Request], config: RunConfig, device: torch.device, num_ranks_here: int
) -> Iterator[Loader]:
    """Open a loader for a few reads, with a worker process if training uses workers.

    A dataset that opens its files at the first read would otherwise pass this process's open files to all workers,
    which would then share one file position.
    """
    workers = choose_num_workers(config.loader.num_workers, samples, device, num_ranks_here=num_ranks_here)
    loader = Loader(
        samples,
        lambda: iter(requests),
        device,
        num_workers=min(1, workers),
        channels_last=config.channels_last,
        # The hang detector starts after the model is built.
        timeout_s=config.watch.hang_timeout_s,
    )
    try:
        yield loader
    finally:
        loader.close()


def digest_of_sizes(samples: Samples) -> str | None:
    """Return a digest of the names and sizes of a dataset's `files`, if it has any; of very many files, of a subset."""
    files = as_samples(samples).files
    if files is None or not len(files):
        return None
    digest = hashlib.sha256(str(len(files)).encode())
    for index in range(0, len(files), -(-len(files) // MAX_FILES)):
        path = files[index]
        if not isinstance(path, str | os.PathLike):
            return None  # the dataset uses this name for something else
        try:
            size = os.stat(path).st_size
        except OSError:
            size = -1  # a file that only one machine lacks is a difference as well
        digest.update(os.fsencode(f"{os.path.basename(path)} {size}\n"))  # no folder: data.root may differ
    return short_digest(digest.digest())
