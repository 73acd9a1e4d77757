"""The world of a script that Samebits has not started, and whether all of its ranks have the same script and data."""

import atexit
import os
import secrets
import socket
import sys
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore

from samebits.cluster import collectives
from samebits.cluster.address import machine, numbered
from samebits.cluster.env import ALONE, node_number, read_assignment
from samebits.cluster.signed import Seal, SignedStore
from samebits.cluster.world import World, add_group, alone, join
from samebits.cores import schedule_threads
from samebits.data.keyed import keys
from samebits.data.samples import sample_digests
from samebits.data.seeding import seeded
from samebits.errors import DataError
from samebits.own_loop.guard import fault
from samebits.own_loop.samples import LoaderSource
from samebits.own_loop.session import ExactLoop
from samebits.parallel.checksum import checksums
from samebits.portable.scripts import own_kernels
from samebits.provenance.fingerprint import code_digests, digest_of_sizes
from samebits.watchdog.detector import HangDetector

# The world of a script that Samebits has not started: its own process group, or what its launcher describes.


JOIN_TIMEOUT_S = 300.0
_JOINED: list[World] = []
_DETECTORS: dict[int, HangDetector] = {}  # by the identity of the world's activity
# of the default process group; at most one
_OF_GROUP: list[tuple[weakref.ref[dist.ProcessGroup], World]] = []


def current_world(device: torch.device) -> World:
    """Return the world of this process: its default process group, one joined now, or this process alone.

    A process group that the script has not made is joined as torchrun, srun or mpirun describe it, and left at exit.

    Raises:
        LaunchError: The processes cannot join each other.
    """
    if _JOINED:
        return _JOINED[0]
    if dist.is_initialized():
        return _of_default_group(device)
    assignment = read_assignment(os.environ)
    if assignment is None or assignment.world_size == 1:
        return replace(alone("cpu"), device=device)
    stack = ExitStack()
    _JOINED.append(stack.enter_context(join(assignment, device=device.type)))
    # The script has no block that ends; its exit code stays what it is.
    atexit.register(stack.close)
    return _JOINED[0]


def _of_default_group(device: torch.device) -> World:
    # The script has made it, and torch has no public name for it.
    group = dist.distributed_c10d._get_default_group()
    if _OF_GROUP and _OF_GROUP[0][0]() is group:
        # with the activity that the hang detector reads
        return replace(_OF_GROUP[0][1], device=device)
    rank = dist.get_rank()
    size = dist.get_world_size()
    assignment = replace(ALONE, rank=rank, world_size=size, local_rank=None, local_world_size=None)
    # Not the script's own keys. The store of torchrun's agent outlives rank 0.
    store = (
        PrefixStore("samebits", dist.distributed_c10d._get_default_store()) if size > 1 else None
    )
    signed = SignedStore(PrefixStore("signed", store), Seal()) if store is not None else None
    name = socket.gethostname()
    world = World(rank, size, 0, device, dist.get_backend(), name, store, assignment, signed=signed)
    collectives.barrier(world, JOIN_TIMEOUT_S)  # names the ranks that do not come here
    machines = numbered(collectives.all_gather_object(world, machine(node_number(os.environ))))
    world = replace(world, local_rank=machines[:rank].count(machines[rank]), machines=machines)
    add_group()
    schedule_threads(world.local_rank, torch.get_num_threads())
    # Weak: a group that the script destroys must not live on here, and its world must not be used again.
    _OF_GROUP[:] = [(weakref.ref(group), world)]
    return world


def watch(world: World, timeout_s: float | None) -> None:
    """Find a rank that hangs in the body of a loop, until the process ends. Called on all ranks.

    Between loops a script may do anything for any time, on some ranks only. The detector is paused there.

    Args:
        timeout_s: How long all ranks may make no progress, seconds; None: do not watch.
    """
    if world.size == 1 or timeout_s is None or id(world.activity) in _DETECTORS:
        return
    world.activity.is_paused = True
    # One folder for all ranks of a machine. It is made when there is something to write.
    name = collectives.broadcast_object(world, f"samebits-stacks-{secrets.token_hex(4)}")
    detector = HangDetector(world, timeout_s, Path(tempfile.gettempdir()) / name, "hang_timeout_s")
    _DETECTORS[id(world.activity)] = detector.__enter__()
    # The script has no block that ends. A thread in the store's client must not meet the interpreter's end.
    atexit.register(detector.__exit__, None, None, None)


# Whether all ranks have the same script and data, and before each epoch the same weights and optimizer state.


NUM_SAMPLES = 4  # that are read, spread over the dataset
# torch.compile numbers modules by their addresses, which differ between processes
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_torchdynamo_wrapper_id"})
_MAX_ITEMS = 100  # of a list that is compared


def check_equal_state(loop: ExactLoop, world: World) -> None:
    """Compare the ranks. Called on all of them.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    if world.size == 1:
        return
    for values in _compare(world, {"": loop.habits.has_drawn}).values():
        raise fault("drawn", given=values)
    names = _compare(world, {"position": loop.step, **checksums(loop.state())})
    for name, values in names.items():
        raise fault("ranks", given=values, step=loop.step, name=name, num=len(names))
    # A warning: what forward only notes, such as its last loss, changes no result.
    for name, values in _compare(world, _attributes(loop.modules)).items():
        if world.is_main:
            warnings.warn(
                f"the attribute {name} of the model differs between the ranks ({values}): forward sets it from the "
                "batches that a rank sees. If forward also reads it, results depend on the number of processes. Set it "
                "before training, or call the model once with the same batch on all ranks.",
                stacklevel=2,
            )


def _attributes(modules: Sequence[nn.Module]) -> dict[str, str]:
    """Return the plain values of the modules' attributes, such as numbers and lists of them, as text by name."""
    return {
        f"{number}.{name}.{key}" if number else f"{name}.{key}".lstrip("."): repr(value)
        for number, root in enumerate(modules)
        for name, module in root.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _MAX_ITEMS and all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | None)


def check_same_script(world: World, settings: Mapping[str, Any]) -> None:
    """Compare the script, its modules and the settings of `exact` between the ranks. Called on all of them.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""  # a notebook has none
    kernels = own_kernels()
    mine = {**settings, "kernels": kernels, **code_digests(script)}
    if kernels == "auto":
        mine["version of torch"] = torch.__version__
    for name, values in _compare(world, mine).items():
        raise fault("script", given=values, name=name)


def check_same_order(world: World, loop: ExactLoop) -> None:
    """Compare the order of the parameters in the optimizers between the ranks. Called on all of them.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    for values in _compare(world, {"": loop.order}).values():
        raise fault("order", given=values, there="on another rank")


def check_same_data(world: World, source: LoaderSource, seed: int) -> None:
    """Compare the ranks' datasets: number of samples, sizes of files, and a few samples. Called on all ranks.

    Each of these samples is read twice, also on one process.

    Every rank computes its share of one order. With a split or a shuffle that is not seeded, index 5 is another sample
    on each rank: some samples would be used twice in an epoch and others never, and no later check could find it.

    Raises:
        DataError: They differ; the same error on all ranks.
    """
    mine = _describe(source, seed)
    for name, values in _compare(world, mine).items():
        raise DataError(
            f"the ranks have different data: {name}",
            given=values,
            cause="A split or a shuffle without a seed, or other files on one machine.",
            fix="Seed everything that chooses samples, and give all ranks the same files.",
        )


def _compare(world: World, mine: Mapping[str, Any]) -> dict[str, str]:
    """Return the names under which ranks have different values, with these values as text. Called on all ranks."""
    # One digest first, since all values would be sent to all ranks otherwise.
    if world.size == 1 or collectives.are_equal(world, mine):
        return {}
    by_rank = collectives.all_gather_object(world, mine)
    names = dict.fromkeys(name for own in by_rank for name in own)
    # What all ranks have is named first: a script in another folder also lacks the files of its folder.
    in_order = sorted(names, key=lambda name: any(name not in own for own in by_rank))
    values = {name: [str(own.get(name, "missing")) for own in by_rank] for name in in_order}
    return {
        name: ", ".join(f"rank {rank}: {value[:20]}" for rank, value in enumerate(found))[:300]
        for name, found in values.items()
        if len(set(found)) > 1
    }


def _describe(source: LoaderSource, seed: int) -> dict[str, str]:
    samples = source.samples
    found = {
        "number of samples": f"{len(samples):,}",
        "sizes of its files": digest_of_sizes(samples) or "none",
    }
    indices = np.unique(np.linspace(0, len(samples) - 1, NUM_SAMPLES, dtype=np.int64))
    requests = [(each, keys(seed, 0, each)) for each in indices.reshape(-1, 1)] * 2
    # In a worker, as in training: open files of some libraries do not survive a fork.
    with seeded(seed):
        loader = source.open(
            lambda: iter(requests), torch.device("cpu"), num_workers=min(1, source.num_workers)
        )
        try:
            for number, request in enumerate(requests):
                digests = sample_digests(loader.raw(*request))
                mine = {f"sample {index}": digest for index, digest in digests.items()}
                if number >= len(requests) // 2 and any(found[name] != mine[name] for name in mine):
                    raise fault("samples", number=request[0][0])
                found |= mine
        finally:
            loader.close()
    return found
