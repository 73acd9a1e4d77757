"""The world of a script that Samebits has not started: its own process group, or what its launcher describes."""

import atexit
import os
import secrets
import socket
import tempfile
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from samebits.cluster import collectives
from samebits.cluster.address import machine, numbered
from samebits.cluster.env import ALONE, node_number, read_assignment
from samebits.cluster.signed import Seal, SignedStore
from samebits.cluster.world import World, add_group, alone, join
from samebits.cores import schedule_threads
from samebits.watchdog.detector import HangDetector

JOIN_TIMEOUT_S = 300.0
_JOINED: list[World] = []
_DETECTORS: dict[int, HangDetector] = {}  # by the identity of the world's activity
_OF_GROUP: list[
    tuple[weakref.ref[dist.ProcessGroup], World]
] = []  # of the default process group; at most one


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
        return replace(
            _OF_GROUP[0][1], device=device
        )  # with the activity that the hang detector reads
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
