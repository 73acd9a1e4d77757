"""The world: the processes that execute a run now, this process's rank among them, and the device it computes on."""

import itertools
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from samebits.cluster import abort, connecting, rendezvous, stacks
from samebits.cluster.activity import Activity
from samebits.cluster.address import interface_towards, machine, numbered
from samebits.cluster.connecting import first_line, is_lost_peer
from samebits.cluster.env import ALONE, RankAssignment
from samebits.cluster.rendezvous import RankInfo, ranks_text
from samebits.cluster.signed import SignedStore
from samebits.cluster.timeout import call_with_timeout
from samebits.cluster.views.membership import Membership
from samebits.cores import schedule_threads
from samebits.errors import LaunchError
from samebits.open_files import out_of_files, raise_open_files

# The communication backend of a world: gloo or NCCL. gloo has two process groups, one for each direction.
#
# Two ranks that exchange values send to each other at the same time. On one connection, a rank's gloo thread then
# receives in the middle of the main thread's send, and needs the lock that the send holds. It tries again and again,
# often on the main thread's core, until the system takes the core away, milliseconds later. With a group for messages
# to higher ranks and another one for those to lower ranks, values arrive on another connection than they are sent.
# `python -m benchmarks.exact_cost --one-group` measures both.


# Each group connects each rank to all others. Larger worlds have the default group's connections only.
MAX_RANKS = 64
# Of each default group, the group of messages to higher ranks.
# Weak, so that this table does not keep a group that was destroyed.
_UPWARDS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def choose_backend(infos: Sequence[RankInfo]) -> tuple[str, str]:
    """Select the backend from all ranks' `infos`, equally on all; return it with a warning or "".

    Raises:
        LaunchError: The ranks use different kinds of device, or the backend is not available.
    """
    for name in ("device", "backend"):
        groups: dict[str, list[int]] = {}
        for info in infos:
            groups.setdefault(getattr(info, name), []).append(info.rank)
        if len(groups) > 1:
            parts = [f"{value} on {ranks_text(ranks)}" for value, ranks in groups.items()]
            raise LaunchError(
                f"the processes don't agree on the {name}: {', '.join(parts)}",
                fix=f"Set {'device=cpu or device=cuda' if name == 'device' else 'cluster.backend'} for all processes.",
            )
    device = infos[0].device
    asked = infos[0].backend
    if asked == "nccl" and device != "cuda":
        raise LaunchError(
            "cluster.backend is nccl, but the device is cpu",
            fix="Set cluster.backend=gloo or device=cuda.",
        )
    shared = [
        info.host for info in infos if sum(c.host == info.host for c in infos) > info.num_gpus
    ]
    if device == "cuda" and shared:
        # NCCL does not support two ranks on one GPU.
        count = sum(info.host == shared[0] for info in infos)
        gpus = next(info.num_gpus for info in infos if info.host == shared[0])
        if asked == "nccl":
            raise LaunchError(
                f"cluster.backend is nccl, but {count} processes share {gpus} GPU(s) on {shared[0]}",
                fix=f"Start at most {gpus} there, or set cluster.backend=gloo.",
            )
        return (
            "gloo",
            f"warning: {count} processes share {gpus} GPU(s) on {shared[0]}: gloo instead of nccl, slower",
        )
    if asked != "auto":
        return asked, ""
    return ("nccl" if device == "cuda" else "gloo"), ""


def add_group() -> None:
    """Start the second group of the default group, if that is gloo's. All ranks call this.

    It has the timeout of the default group, and ends with it, in torch's `destroy_process_group()`.
    """
    if dist.get_backend() == "gloo" and 1 < dist.get_world_size() <= MAX_RANKS:
        # Neither the default group nor its timeout has a public name.
        default = dist.distributed_c10d._get_default_group()
        timeout = default._get_backend(torch.device("cpu")).options._timeout
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # all ranks are in it
        _UPWARDS[default] = group


def group_for(
    peer: int, *, is_receive: bool, default: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """Return the group of a message from or to a rank of `default`, the default group; None: the present one."""
    default = default or dist.distributed_c10d._get_default_group()
    # A message goes upwards if it is received from a lower rank, or sent to a higher one.
    is_upwards = (peer < default.rank()) == is_receive
    return _UPWARDS.get(default, default) if is_upwards else default


GOODBYE_S = 10.0
# How much longer than `cluster.join_timeout_s` to wait for the store, whose own error names the missing ranks.
UNANSWERED_S = 40.0


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int  #: 0 <= rank < size.
    size: int  #: Number of processes.
    local_rank: int  #: Rank among the processes of this machine.
    device: torch.device  #: Device of this process.
    backend: str  #: What carries tensors: gloo or nccl; none in a world of one process.
    host: str  #: Name of this machine.
    #: Keys and values that all processes share; None in a world of one process.
    store: Store | None
    assignment: RankAssignment  #: How this process was started.
    #: For each rank the number of its machine, from 0; empty: all are on one.
    machines: tuple[int, ...] = ()
    restart: int = 0  #: How many worlds this run has had before, at least.
    #: Values in the store that only processes with the run's key can write; None in a world of one process.
    signed: SignedStore | None = field(default=None, repr=False, compare=False)
    #: The numbers of the barriers that this process has not reached yet.
    turns: Iterator[int] = field(
        default_factory=lambda: itertools.count(1), repr=False, compare=False
    )
    #: What the main thread is doing now; the hang detector reads it.
    activity: Activity = field(default_factory=Activity, repr=False, compare=False)
    #: The members that the launcher names, where they may change during a run; otherwise None.
    membership: Membership | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @property
    def is_replacement(self) -> bool:
        """Whether this process has no rank yet: it replaces a lost one."""
        return self.rank < 0

    @property
    def gloo_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks if gloo carries tensors; otherwise None, also where ranks are simulated."""
        return dist.group.WORLD if self.backend == "gloo" and dist.is_initialized() else None

    @property
    def num_hosts(self) -> int:
        """Number of machines."""
        return len({*self.machines}) or 1

    @property
    def num_ranks_here(self) -> int:
        """Number of ranks on this machine; the largest number if machines differ."""
        return max(Counter(self.machines).values(), default=self.size)


def layout_text(machines: Sequence[int]) -> str:
    """Describe how ranks on these machines exchange a bucket: the way, and what leaves a machine in a step."""
    counts = [*Counter(machines).values()]
    size = len(counts)
    if size < 2:
        return "in one level: all ranks are on one machine"
    messages = 2 * (max(counts) - 1) + 2 * (size - 1)
    way = "in two levels" if max(counts) > 1 else "in one level"
    ranks = (
        f"{counts[0]} rank{'s' * (counts[0] > 1)} each"
        if len({*counts}) == 1
        else f"{min(counts)} to {max(counts)} ranks"
    )
    return (
        f"{way}: {size} machines with {ranks}; "
        f"a machine sends {2 * (size - 1) / size:.2f} of the gradient, a rank {messages} messages a large bucket"
    )


def alone(device: str = "auto") -> World:
    """Return a world of this process only, on auto, cpu or cuda; starts nothing.

    Raises:
        LaunchError: The device does not exist.
    """
    chosen = _device(_device_kind(device), 0)
    return World(0, 1, 0, chosen, "none", socket.gethostname(), None, ALONE)


@contextmanager
def join(
    assignment: RankAssignment,
    *,
    device: str = "auto",
    backend: str = "auto",
    join_timeout_s: float = 300.0,
    timeout_s: float = 600.0,
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Iterator[World]:
    """Join the other processes' process group until the block ends.

    Args:
        device: auto, cpu or cuda. auto uses CUDA if it is available.
        backend: auto, gloo or nccl. auto uses nccl for CUDA, gloo otherwise.
        join_timeout_s, timeout_s: Longest wait until all ranks have joined, and then in a collective, seconds.
        report: Called with log lines about missing ranks.

    Raises:
        LaunchError: The ranks cannot reach or contradict each other, or one is lost while the block runs.
    """
    if assignment.started_by == "alone":
        yield alone(device)
        return
    raise_open_files()
    kind = _device_kind(device)
    start = time.monotonic()
    limit_s = join_timeout_s + UNANSWERED_S
    num_gpus = torch.cuda.device_count() if kind == "cuda" else 0
    who = (assignment.rank, assignment.world_size, socket.gethostname(), os.getpid())
    mine = RankInfo(
        *who,
        kind,
        backend,
        num_gpus,
        namespace=stacks.namespace(),
        machine=machine(assignment.node),
    )
    try:
        # In a thread, since another program may keep a call to the store from its end.
        store, infos = call_with_timeout(
            lambda: rendezvous.rendezvous(assignment, mine, join_timeout_s, report), limit_s
        )
    except TimeoutError:
        raise LaunchError(
            f"rank {assignment.rank} received no answer from the store at {assignment.init} for {limit_s:.0f} s",
            cause="rank 0 was stopped, or another program has written to that store",
            fix="End all processes of the run, and start them with another --init.",
        ) from None
    chosen, warning = choose_backend(infos)
    if warning and assignment.rank == 0:
        report(warning)
    world = _world(assignment, mine, store, infos, chosen)
    if len(networks := {info.network for info in infos}) == 1 and "" not in networks:
        # All ranks are on one machine: gloo then listens where no other machine can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _start_group(world, infos, timeout_s, connecting.time_left(join_timeout_s, start), report)
    try:
        yield world
    except BaseException as error:
        if not is_lost_peer(error):
            abort.record(error)
        _end_group()
        if is_lost_peer(error):
            raise LaunchError(
                f"rank {world.rank} ({world.host}) lost another process",
                given=first_line(error)[:200],
                cause=out_of_files() or "that process has ended; its own output gives the reason",
                fix="Read the output of the other ranks, or logs/ in the run folder.",
            ) from error
        raise
    assert world.signed is not None
    shared = world.signed.store
    # The run is complete: a store that does not answer any more must not delay the exit.
    with suppress(TimeoutError):
        call_with_timeout(
            lambda: connecting.wait_for_all(shared, world.size, GOODBYE_S), 2 * GOODBYE_S
        )
    _end_group()
    with suppress(TimeoutError):
        call_with_timeout(
            lambda: rendezvous.goodbye(world.assignment, store, GOODBYE_S), 2 * GOODBYE_S
        )


def _world(
    assignment: RankAssignment,
    mine: RankInfo,
    store: SignedStore,
    infos: Sequence[RankInfo],
    backend: str,
) -> World:
    here = [info.rank for info in infos if info.host == mine.host]
    local_rank = (
        here.index(assignment.rank) if assignment.local_rank is None else assignment.local_rank
    )
    return World(
        rank=assignment.rank,
        size=assignment.world_size,
        local_rank=local_rank,
        device=_device(mine.device, local_rank),
        backend=backend,
        host=mine.host,
        store=PrefixStore("world", store.store),
        signed=SignedStore(PrefixStore("signed", store.store), store.seal),
        assignment=assignment,
        machines=numbered([info.machine for info in infos]),
        restart=max(info.restart for info in infos),
    )


def _device_kind(device: str) -> str:
    if device == "cpu":
        return "cpu"
    available = torch.cuda.is_available()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    if device == "cuda" and not available:
        raise LaunchError(
            "device is cuda, but torch finds no CUDA device",
            given=f"torch {torch.__version__}, CUDA_VISIBLE_DEVICES={visible}",
            where=socket.gethostname(),
            fix="Set device=cpu, or check the driver with nvidia-smi.",
        )
    return "cuda" if available else "cpu"


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _start_group(
    world: World,
    infos: Sequence[RankInfo],
    timeout_s: float,
    limit_s: float,
    report: Callable[[str], None],
) -> None:
    assignment = world.assignment
    assert world.signed is not None
    # By default gloo resolves its own host name, which may have no address, or one that peers cannot reach.
    if world.backend == "gloo" and (name := interface_towards(assignment.init)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    def start() -> None:
        if world.device.type == "cuda":  # the current device is per thread
            torch.cuda.set_device(world.device)
        dist.init_process_group(
            world.backend,
            store=world.store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
            # Binds NCCL's communicator at once, so that a fault shows here and not in the first collective.
            device_id=world.device if world.backend == "nccl" else None,
        )
        add_group()

    has_store = assignment.agent_store
    connecting.connect(
        start, world.rank, infos, world.signed, limit_s, report, has_agent_store=has_store
    )
    schedule_threads(world.local_rank, torch.get_num_threads())


def _end_group() -> None:
    def destroy() -> None:
        # A group that has failed has reported its error already.
        try:
            dist.destroy_process_group()
        except Exception as error:
            print(f"process group: {first_line(error)}", file=sys.stderr)

    if dist.is_initialized():
        # In a thread, since destroying the group can block forever after a peer has died.
        thread = threading.Thread(target=destroy, name="destroy-process-group", daemon=True)
        thread.start()
        thread.join(GOODBYE_S)
