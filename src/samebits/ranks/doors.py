"""What of torch is replaced in a rank before its script is imported, so that nothing depends on where the rank runs.

Everything else is torch's: DistributedDataParallel, samplers, schedulers, averages and loops do what they always do.
"""

import hashlib
import mmap
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from samebits import scratch
from samebits.errors import ConfigError
from samebits.ranks import sync_batch_norm
from samebits.ranks.devices import Baton, replaces
from samebits.ranks.group import BACKEND, make_known

# Random numbers of a rank: they depend on the seed, the rank and the epoch, never on where the rank runs.
#
#     the rank starts     torch, numpy and Python are seeded by (seed, rank), for a script that leaves one unseeded
#     manual_seed(7)      the script's own seed is used as it is
#     set_epoch(3)        all three are keyed again, by (the seed that each of them had, 3)
#
# So a script that saves no random state resumes with the numbers that it would have drawn. A script that gives all
# ranks one seed still has equal numbers on all ranks, as under torchrun.


def key_of(*parts: object) -> int:
    """Return a seed of 32 bits, which numpy takes too, from any values."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


class Generators:
    """The global generators of torch, numpy and Python, seeded for one rank.

    Attributes:
        epoch: The epoch by which they were keyed last; None before the first one.
    """

    def __init__(self, seed: int, rank: int) -> None:
        base = key_of(seed, rank)
        self.epoch: int | None = None
        self._bases: dict[str, object] = {"torch": base, "numpy": base, "python": base}
        # In the modules: scripts that seed a generator of their own are not concerned.
        self._seed_numpy = _noted(np.random, partial(self._bases.__setitem__, "numpy"))
        self._seed_python = _noted(random, partial(self._bases.__setitem__, "python"))
        np.random.default_rng = self._default_rng(np.random.default_rng)
        self._torch_key = base
        torch.manual_seed(base)
        self._seed_numpy(base)
        self._seed_python(base)

    def set_epoch(self, epoch: int) -> None:
        """Key all of them by an epoch, which a script names before it trains on it."""
        self.epoch = epoch
        if torch.initial_seed() != self._torch_key:  # the script has seeded it since
            self._bases["torch"] = torch.initial_seed()
        self._torch_key = key_of(self._bases["torch"], epoch)
        torch.manual_seed(self._torch_key)
        self._seed_numpy(key_of(self._bases["numpy"], epoch))
        self._seed_python(key_of(self._bases["python"], epoch))

    def _default_rng(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Seed numpy's new generators, which would draw a seed from the system, as libraries of augmentations do."""
        count = 0

        def default_rng(seed: Any = None) -> Any:
            nonlocal count
            if seed is None:
                count += 1
                # In a worker of a DataLoader, torch's seed is the worker's.
                seed = [torch.initial_seed() & 0xFFFFFFFF, count]
            return plain(seed)

        return default_rng


def _noted(module: Any, note: Callable[[object], None]) -> Callable[..., None]:
    """Let a module's seeding function note what it is given; return the plain one."""
    plain: Callable[..., None] = module.seed

    def seed(value: Any = None, *args: Any, **kwargs: Any) -> None:
        plain(value, *args, **kwargs)
        note(value if value is None or isinstance(value, int | str | bytes) else repr(value))

    module.seed = seed
    return plain


_CORE = f"{Path(__file__).parents[1]}/"
_WHOLE_GRADIENT_MB = 1 << 20  # more than a model has


class Doors:
    """The replaced functions of one rank.

    Args:
        rank, num_ranks: This rank, and how many there are.
        address: HOST:PORT where rank 0 serves the store of all ranks.
        baton: The turns of this rank on its GPU; None: ranks compute on CPUs.

    Attributes:
        has_loaded_state: Whether the script has loaded an optimizer's state.
        has_loaded_file: Whether it has loaded a file by torch.load.
        loader: The DataLoader that was read last while gradients are on.
    """

    def __init__(
        self, rank: int, num_ranks: int, address: str, generators: Generators, baton: Baton | None
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._address = address
        self._generators = generators
        self._baton = baton
        self._store: TCPStore | None = None
        self._num_groups = 0
        self._child_groups = mmap.mmap(-1, 1)  # shared with processes that are forked from this one
        self._pid = os.getpid()
        self.has_loaded_state = False
        self.has_loaded_file = False
        self.loader: DataLoader[Any] | None = None
        if baton is not None:
            make_known(baton)
        self._replace_groups()
        self._replace_switches()
        self._replace_files()
        self._replace_training()

    def check_children(self) -> None:
        """Raise the error of a process that the script has started and waited for, and whose end it has not checked."""
        if self._child_groups[0]:
            raise _started_by_script()

    def wait_for_all(self) -> None:
        """Serve the store until all ranks are done with it, if this is rank 0; others note that they are done."""
        if self._store is None:
            return
        self._store.add("done", 1)
        if self._rank == 0:
            while self._store.add("done", 0) < self._num_ranks:
                time.sleep(0.02)

    def _replace_groups(self) -> None:
        @replaces(dist, "init_process_group")
        def init(plain: Any, *args: Any, **kwargs: Any) -> None:
            names = ("backend", "init_method", "timeout", "world_size", "rank", "store")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # Samebits joins its own world; and a script may start processes that are no ranks.
            is_own = sys._getframe(2).f_code.co_filename.startswith(_CORE)
            is_child = os.getpid() != self._pid
            if is_child and not is_own and self._num_ranks > 1:
                self._child_groups[0] = 1
                raise _started_by_script()
            if is_own or is_child:
                plain(*args, **kwargs)
                return
            self._check("init_process_group()", given.get("world_size", -1), given.get("rank", -1))
            timeout = {} if given.get("timeout") is None else {"timeout": given["timeout"]}
            backend = "gloo" if self._baton is None else BACKEND
            plain(
                backend,
                store=self._next_store(),
                rank=self._rank,
                world_size=self._num_ranks,
                **timeout,
            )

        @replaces(dist, "new_group")
        def new_group(plain: Any, *args: Any, **kwargs: Any) -> Any:
            # Of the one backend that is there, whatever the script names.
            values = list(args)
            values[2:3] = [None] * len(values[2:3])
            return plain(
                *values, **{name: None if name == "backend" else kwargs[name] for name in kwargs}
            )

        @replaces(mp, "spawn", "start_processes")
        def spawn(
            _plain: Any,
            fn: Any,
            args: Any = (),
            nprocs: int = 1,
            join: bool = True,
            *_: Any,
            **__: Any,
        ) -> Any:
            self._check("mp.spawn()", nprocs, None)
            fn(self._rank, *args)
            return None if join else _Ended()

    def _next_store(self) -> PrefixStore:
        if self._store is None:
            host, _, port = self._address.rpartition(":")
            self._store = TCPStore(
                host.strip("[]"), int(port), None, self._rank == 0, wait_for_workers=False
            )
        self._num_groups += 1
        return PrefixStore(f"group {self._num_groups}", self._store)

    def _check(self, name: str, size: int | None, rank: int | None) -> None:
        if size in (-1, None, self._num_ranks) and rank in (-1, None, self._rank):
            return
        given = f"{size} processes" if rank in (-1, None) else f"rank {rank} of {size} processes"
        raise ConfigError(
            f"{name} asks for {given}, and this is rank {self._rank} of {self._num_ranks}",
            cause="samebits launch has started the ranks. The script computes their number from something else, such "
            "as an option of its own or the number of GPUs.",
            fix=f"Start it with --as {size}, or let it read RANK and WORLD_SIZE from the environment."
            if rank in (-1, None) and size
            else "Let the script read RANK and WORLD_SIZE from the environment, as for torchrun.",
        )

    def _replace_switches(self) -> None:
        """Keep the switches that decide bits, also where the script sets them."""
        torch.set_num_threads = _ignored  # a rank has one thread
        kind: Any = type(torch.backends.cudnn)
        kind.benchmark = property(lambda _: False, _ignored)
        kind.deterministic = property(lambda _: True, _ignored)

        @replaces(torch, "use_deterministic_algorithms")
        def use(plain: Any, mode: bool, **_: Any) -> None:
            plain(True)

    def _replace_files(self) -> None:
        @replaces(torch, "save")
        def save(plain: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            """Replace a file at once: one that is killed meanwhile leaves the old one."""
            path = Path(os.path.realpath(f)) if isinstance(f, str | os.PathLike) else None
            if path is None or not path.parent.is_dir() or (path.exists() and not path.is_file()):
                plain(obj, f, *args, **kwargs)  # a stream, a device, or with torch's own error
                return
            with scratch.scratch_folder(path.parent) as folder:
                part = folder / path.name  # torch writes the name into the file
                plain(obj, part, *args, **kwargs)
                os.replace(part, path)

        @replaces(torch, "load")
        def load(plain: Any, *args: Any, **kwargs: Any) -> Any:
            self.has_loaded_file = True
            return plain(*args, **kwargs)

        @replaces(Optimizer, "load_state_dict")
        def load_state(plain: Any, *args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            self.has_loaded_state = True

    def _replace_training(self) -> None:
        @replaces(DistributedSampler, "set_epoch")
        def set_epoch(plain: Any, sampler: Any, epoch: int) -> None:
            plain(sampler, epoch)
            self._generators.set_epoch(epoch)

        @replaces(nn.SyncBatchNorm, "forward")
        def forward(plain: Any, module: nn.SyncBatchNorm, x: torch.Tensor) -> Any:
            if sync_batch_norm.is_synced(module, x):
                return sync_batch_norm.forward(module, x)
            return plain(module, x)

        @replaces(DistributedDataParallel, "_passing_sync_batchnorm_handle")
        def pass_handle(plain: Any, wrapper: Any, module: nn.Module) -> None:
            if wrapper.device_type != "cpu":  # it only refuses CPUs
                plain(wrapper, module)

        @replaces(DataLoader, "__iter__")
        def iterate(plain: Any, loader: DataLoader[Any]) -> Any:
            if torch.is_grad_enabled():
                self.loader = loader
            return plain(loader)

        if self._baton is None:
            return

        @replaces(DistributedDataParallel, "__init__")
        def wrap(plain: Any, *args: Any, **kwargs: Any) -> None:
            # One bucket: its sum is the only wait of a backward pass, at whose end the activations are gone.
            plain(*args, **{**kwargs, "bucket_cap_mb": _WHOLE_GRADIENT_MB})


def _started_by_script() -> ConfigError:
    return ConfigError(
        "the script calls init_process_group() in processes that it starts itself",
        cause="samebits launch has started the ranks, and each of them has started processes of its own.",
        fix="Let the script call its function in each rank, with int(os.environ['RANK']), or start it by mp.spawn().",
    )


class _Ended:
    """What mp.spawn(join=False) returns: processes that have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True


def _ignored(*_: Any, **__: Any) -> None:
    """Do nothing."""
