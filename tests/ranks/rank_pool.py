"""A pool of real processes that form worlds of any size up to theirs, again and again, without a new start.

One leader forks the ranks. It is itself forked from a process that has imported torch already.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from samebits.cluster import stacks
from samebits.cluster.stacks import StackDumper
from tests import guards, warm_start
from tests.runs import ROOT, environment

if TYPE_CHECKING:
    from samebits.cluster.world import World

LIMIT_S = 180.0
# How long the others may take once a rank has failed: some answer, and some wait for it forever.
PEERS_S = 20.0


class RankPool:
    """Processes that run a function as the ranks of a world.

    Args:
        size: The largest world.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._num_worlds = 0
        self._world_size = 0
        self._start()

    def run(self, world_size: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `job(world, *arguments)` returns on each rank of a world.

        Args:
            world_size: How many ranks.
            job: A function at the top of a module; runs in all ranks at once.
            arguments: Picklable.

        Raises:
            AssertionError: A rank raised an error, or gave no answer in time; the rank pool is then started anew.
        """
        if world_size != self._world_size:
            self._num_worlds += 1
            self._world_size = world_size
        meeting = os.path.join(self._folder.name, f"world-{self._num_worlds}")
        for rank, ear in enumerate(self._ears[:world_size]):
            ear.send((meeting, rank, world_size, job, arguments))
        end = time.monotonic() + LIMIT_S
        results: list[Any] = []
        problems: list[str] = []
        num_silent = 0
        for rank, ear in enumerate(self._ears[:world_size]):
            if not ear.poll(max(0.0, end - time.monotonic()) if not problems else PEERS_S):
                problems.append(f"rank {rank} of {world_size} gave no answer:\n{self._stacks(rank)}")
                num_silent += 1
                continue
            try:
                is_good, result = ear.recv()
            except EOFError:
                is_good, result = False, "its process is gone"
                num_silent += 1
            if is_good:
                results.append(result)
            else:
                problems.append(f"rank {rank} of {world_size}:\n{result}")
        if problems:
            self._world_size = 0
            if num_silent:
                self.end()
                self._start()
            raise AssertionError("\n".join(problems))
        return results

    def end(self) -> None:
        """End all processes."""
        for ear in self._ears:
            ear.close()
        self._leader.kill()
        self._leader.wait()
        for pid in self._pids:
            _kill(pid)
        guards.KEPT.difference_update(self._pids, [self._leader.pid])

    def _start(self) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(self._size)]
        control, theirs = socket.socketpair()
        with control, theirs:
            self._leader = warm_start.popen(
                [sys.executable, __file__], env=environment(), cwd=ROOT, stdin=theirs.fileno()
            )
            shared = [resource_tracker.getfd(), *(mouth.fileno() for _, mouth in pairs)]
            socket.send_fds(control, [b"."], shared)
        for _, mouth in pairs:
            mouth.close()
        self._ears = [ear for ear, _ in pairs]
        answers = [ear.recv() for ear in self._ears]
        self._pids = [pid for pid, _ in answers]
        self._dumps = [descriptor for _, descriptor in answers]
        guards.KEPT.update([*self._pids, self._leader.pid])
        self._world_size = 0

    def _stacks(self, rank: int) -> str:
        """Where a rank hangs, and the loader workers that it has forked: they dump to the same file."""
        pid, file = self._pids[rank], os.path.join(self._folder.name, "stacks.txt")
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                stacks.request_stacks(child.pid)
        if stacks.write_for(pid, self._dumps[rank], Path(file), "its stacks and its loader workers':"):
            return Path(file).read_text()
        return "it dumps no stacks"


@contextlib.contextmanager
def new_pool(size: int) -> Iterator[RankPool]:
    """A pool that ends with the block."""
    pool = RankPool(size)
    try:
        yield pool
    finally:
        pool.end()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    # The guards make this process the one that orphans come to.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _lead() -> None:
    _die_with_parent()
    # As in a process that multiprocessing has started anew.
    multiprocessing.set_start_method("spawn")
    # All that a rank and its loader workers need is imported once, before processes are forked.
    import torch._dynamo  # noqa: F401  # the first optimizer of a process imports it, which takes seconds

    import samebits.engine.loop
    import samebits.recipes.catalog  # noqa: F401

    with socket.socket(fileno=os.dup(0)) as control:
        _, (tracker, *descriptors), _, _ = socket.recv_fds(control, 1, 64)
    # As multiprocessing does it: one tracker for all processes, not one that each rank starts.
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    mouths = [Connection(descriptor) for descriptor in descriptors]
    pids = []
    for mouth in mouths:
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            for other in mouths:
                if other is not mouth:
                    other.close()
            _serve(mouth)
            os._exit(0)
        pids.append(pid)
    for mouth in mouths:
        mouth.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _serve(mouth: Connection) -> None:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # MKL reads its variables at the first product of matrices: not those that a job sets for a while, on one rank only.
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    dumper = StackDumper()
    mouth.send((os.getpid(), dumper.descriptor))
    world, at = None, ""
    while True:
        try:
            meeting, rank, size, job, arguments = mouth.recv()
        except EOFError:
            return
        try:
            if stacks.SIGNAL is not None:  # again: an earlier job may have closed a dumper of its own
                faulthandler.register(stacks.SIGNAL, file=dumper.descriptor, all_threads=True)
            if meeting != at:
                world, at = _form(meeting, rank, size), meeting
            mouth.send((True, job(world, *arguments)))
        except BaseException:
            mouth.send((False, traceback.format_exc()))


def _form(meeting: str, rank: int, size: int) -> World:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from samebits.cluster.env import RankAssignment
    from samebits.cluster.signed import Seal, SignedStore
    from samebits.cluster.world import World, add_group

    if dist.is_initialized():
        dist.destroy_process_group()
    assignment = RankAssignment(rank, size, rank, size, "tcp://127.0.0.1:1", "command line")
    store = dist.FileStore(meeting, size) if size > 1 else None
    if store is not None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
        add_group()
    signed = SignedStore(dist.PrefixStore("signed", store), Seal()) if store is not None else None
    return World(rank, size, rank, torch.device("cpu"), "gloo", "here", store, assignment, signed=signed)


if __name__ == "__main__":
    _lead()
