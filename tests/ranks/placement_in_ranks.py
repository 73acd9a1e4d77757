"""What a process of a world reports of gloo's threads and groups; importable by processes that a test launches."""

import ctypes
import os
import platform
import struct
from typing import Any

import torch

import samebits
from samebits.cluster import collectives
from samebits.cluster.world import group_for
from samebits.cores import SCHED_SETATTR, core_ids, gloo_threads
from samebits.parallel.reduce import Reducer


def placements() -> Any:
    """Return for each rank policies and cores of gloo's threads, then cores and time slice (ns) of the main thread."""
    with samebits.world() as world:
        gloo = gloo_threads()
        policies = [os.sched_getscheduler(each) for each in gloo]
        mine = [policies, [sorted(os.sched_getaffinity(each)) for each in gloo], sorted(core_ids()), slice_ns()]
        return collectives.all_gather_object(world, mine)


def slice_ns() -> int:
    """Return this thread's time slice, nanoseconds."""
    attributes = ctypes.create_string_buffer(48)
    sched_getattr = SCHED_SETATTR[platform.machine()] + 1
    assert ctypes.CDLL(None).syscall(sched_getattr, 0, attributes, 48, 0) == 0
    return int(struct.unpack("IIQiIQQQ", attributes.raw)[5])


def groups() -> Any:
    """Return for each rank the names of the groups in which it sends to the other ranks and receives from them."""
    with samebits.world() as world:
        others = [rank for rank in range(world.size) if rank != world.rank]
        names = {
            **{(world.rank, other): group_for(other, is_receive=False).group_name for other in others},
            **{(other, world.rank): group_for(other, is_receive=True).group_name for other in others},
        }
        timeouts = {
            group_for(other, is_receive=way)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for other in others
            for way in (False, True)
        }
        return collectives.all_gather_object(world, [sorted([*names.items()]), sorted(timeouts)])


def policies_with_batch_norm() -> Any:
    """Return for each rank the policies of gloo's threads once a model with synchronized batch norm has its sums."""
    with samebits.world() as world:
        Reducer(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), world, synchronized=True)
        return collectives.all_gather_object(world, [os.sched_getscheduler(each) for each in gloo_threads()])
