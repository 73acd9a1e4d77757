"""Worlds whose members change while their processes stay: leave the group of one view, and form that of the next.

    end the old group: blocked calls of all ranks raise an error
    connect to the launcher's store of the view, check in, wait until all members have checked in
    start the group

The launcher serves a store for each view and closes it when the next one begins, so a rank that is still waiting for a
member which is lost meanwhile gets an error at once, and continues with the next view.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from samebits.cluster import abort
from samebits.cluster.address import interface_towards, machine, numbered
from samebits.cluster.connecting import first_line, is_lost_peer
from samebits.cluster.env import RankAssignment
from samebits.cluster.signed import Seal, SignedStore
from samebits.cluster.timeout import call_with_timeout
from samebits.cluster.views import torch_traps
from samebits.cluster.views.membership import Membership, View, ViewEnded
from samebits.cluster.world import World, add_group, alone
from samebits.cores import schedule_threads
from samebits.errors import LaunchError
from samebits.open_files import raise_open_files

T = TypeVar("T")
# How long to wait for the launcher's store.
CONNECT_S = 10.0
# How long to wait for all members to connect, once they have checked in; and until a call of an ended view returns.
JOIN_S = 60.0
LEAVE_S = 1.0
DESTROY_S = 10.0


def is_loss(error: BaseException) -> bool:
    """Return whether an error can come from the loss of another process, or of its store."""
    return isinstance(error, (ViewEnded, dist.DistError)) or is_lost_peer(error)


@contextmanager
def join_views(
    assignment: RankAssignment, join_timeout_s: float, timeout_s: float
) -> Iterator[World]:
    """Join the present view of a launcher whose processes recover in the step, until the block ends.

    A process that replaces a lost one is no member yet. Its world has no other process and no rank, until `regroup`.

    Raises:
        LaunchError: Other members have not joined in time.
    """
    raise_open_files()
    membership = Membership(Path(assignment.views), assignment.member)
    membership.watch(torch_traps.end_group)
    newcomer = replace(alone("cpu"), rank=-1, assignment=assignment, membership=membership)
    try:
        try:
            yield (
                regroup(newcomer, timeout_s, join_timeout_s) if membership.is_member else newcomer
            )
        except BaseException as error:
            if not is_loss(error):
                abort.record(error)
                raise
            raise LaunchError(
                f"member {assignment.member} lost another process",
                given=first_line(error)[:200],
                cause="that process has ended; its own output gives the reason",
                fix="Read the output of the other ranks, or logs/ in the run folder.",
            ) from error
    finally:
        membership.close()
        # With the lock, since the watch thread may be ending the group.
        with membership.lock:
            _leave_group()


def regroup(world: World, timeout_s: float, join_timeout_s: float | None = None) -> World:
    """Leave the world's group, and form that of the newest view. The new world keeps activity and membership.

    Args:
        join_timeout_s: How long to wait until all members have checked in, seconds; None: `timeout_s`. They may have
            to finish a step, a validation or a checkpoint before.

    Raises:
        ViewEnded: Another view has begun meanwhile.
        LaunchError: A member has not checked in, or torch does not end the last group.
        RuntimeError: The group could not be formed.
    """
    membership = world.membership
    assert membership is not None
    with membership.lock:
        if not _leave_group():
            # Its thread would clear what torch notes of the next group.
            raise LaunchError(
                f"torch has not ended the group of the last view in {DESTROY_S:.0f} s",
                fix="Resume the run, or set --max-restarts.",
            )
        view = membership.read()
        membership.present = view
    rank = view.members.index(membership.member)
    size = len(view.members)
    if interface := interface_towards(f"tcp://{view.host}:{view.port}"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    seconds = timedelta(seconds=CONNECT_S)
    try:
        _call(
            lambda: socket.create_connection((view.host, view.port), CONNECT_S).close(),
            membership,
            view,
        )
    except OSError as error:  # torch would try again until its timeout
        raise ViewEnded(f"the store of view {view.number} is closed: {error}") from None

    def connect() -> TCPStore:
        return TCPStore(view.host, view.port, None, False, seconds, wait_for_workers=False)

    store = PrefixStore(f"view/{view.number}", _call(connect, membership, view))
    signed = SignedStore(
        PrefixStore("signed", store), Seal(world.assignment.key, f"view {view.number}")
    )
    here = machine(world.assignment.node)
    # They may be in a long validation, so each look counts as progress.

    def beat() -> None:
        world.activity.enter("waiting for the other processes", waits=True)

    limit_s = timeout_s if join_timeout_s is None else join_timeout_s
    machines = _check_in(signed, membership, view, rank, here, limit_s, beat)

    def start() -> None:
        torch_traps.count_groups_from_0()
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        add_group()

    _call(start, membership, view)
    schedule_threads(rank, torch.get_num_threads())
    return replace(
        world, rank=rank, size=size, local_rank=rank, backend="gloo", store=PrefixStore("world", store), signed=signed,
        restart=world.assignment.restart, machines=numbered(machines),
    )  # fmt: skip


def _check_in(
    signed: SignedStore, membership: Membership, view: View, rank: int, here: str, limit_s: float,
    beat: Callable[[], object],
) -> list[str]:  # fmt: skip
    """Wait until all members have checked in; return the identifiers of their machines."""
    signed.put(f"here/{rank}", [membership.member, here])
    machines = [""] * len(view.members)
    missing = [*range(len(view.members))]
    began = time.monotonic()

    def is_missing(other: int) -> bool:
        match signed.get(f"here/{other}"):
            case [member, str(name)] if member == view.members[other]:
                machines[other] = name
                return False
        return True

    while missing := [other for other in missing if is_missing(other)]:
        if membership.has_ended(view):
            raise ViewEnded(f"view {view.number} has ended")
        beat()
        membership.note_wait(view, time.monotonic() - began)
        if time.monotonic() - began > limit_s:
            raise LaunchError(
                f"waited {limit_s:.0f} s for {len(view.members)} processes: {len(missing)} did not join",
                given=f"ranks {missing[:16]}",
                where="cluster.join_timeout_s",
                fix="Read the output of these ranks.",
            )
        time.sleep(0.002)
    return machines


def _call(call: Callable[[], T], membership: Membership, view: View) -> T:
    """Make a call that can block, and raise ViewEnded soon after its view has ended."""
    before = torch_traps.open_sockets()
    ended_at = 0.0

    def tick(waited_s: float) -> None:
        nonlocal ended_at
        membership.note_wait(view, waited_s)
        if not ended_at and membership.has_ended(view):
            ended_at = waited_s
            # The launcher has closed the store. With the connections of this call shut down, it mostly ends.
            torch_traps.add_sockets(before)
            torch_traps.end_group()
        # A call that still waits for a lost member to connect fails in its thread after the group's timeout.
        if ended_at and waited_s > ended_at + LEAVE_S:
            raise ViewEnded(f"view {view.number} has ended")

    try:
        found = call_with_timeout(call, JOIN_S, tick)
    except (RuntimeError, ValueError) as error:
        raise ViewEnded(f"view {view.number} has ended") if ended_at else error from None
    if ended_at:
        raise ViewEnded(f"view {view.number} has ended")
    torch_traps.add_sockets(before)
    return found


def _leave_group() -> bool:
    """End the group, if there is one; return whether torch has ended it in time."""
    torch_traps.end_group()
    torch_traps.forget_group()
    if not dist.is_initialized():
        return True
    is_over = threading.Event()
    arguments = is_over, torch_traps.groups()
    threading.Thread(
        target=_destroy, args=arguments, name="destroy-process-group", daemon=True
    ).start()
    return is_over.wait(DESTROY_S)


# In a thread, since it can block forever after a peer has died, and so can the destructor of a group: the main thread
# must not drop the last reference, such as with the exchanges of the step that was lost.
def _destroy(is_over: threading.Event, groups: list[Any]) -> None:
    with suppress(RuntimeError):  # it has ended
        dist.destroy_process_group()
    is_over.set()
    torch_traps.drop_last(groups)
