"""The world of a script that Lockstep has not started: its own process group, or what its launcher describes."""

from __future__ import annotations

import atexit
import os
import socket
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist

from lockstep.cluster import collectives
from lockstep.cluster.env import ALONE, read_assignment
from lockstep.cluster.world import World, alone, join

_JOINED: list[World] = []


def current_world(device: torch.device) -> World:
    """Return the world of this process: its default process group, one joined now, or this process alone.

    A process group that the script has not made is joined as torchrun, srun or mpirun describe it, and left at exit.

    Args:
        device: Device of the model.

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
    rank, size = dist.get_rank(), dist.get_world_size()
    assignment = replace(ALONE, rank=rank, world_size=size, local_rank=None, local_world_size=None)
    world = World(rank, size, 0, device, dist.get_backend(), socket.gethostname(), None, assignment)
    hosts = collectives.all_gather_object(world, world.host)
    return replace(world, local_rank=hosts[:rank].count(world.host), num_hosts=len(set(hosts)))
