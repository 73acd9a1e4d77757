"""What in-step recovery needs of torch that torch has no call for: traps of its process groups, and waits that end
with their group.
"""

import array
import fcntl
import os
import queue
import socket
import stat
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from samebits.cluster.timeout import CallThread
from samebits.cluster.views.membership import WATCH_S, Membership, ViewEnded

# What in-step recovery does to torch that torch has no call for. `test_torch_traps` fails once torch has changed.
#
# - gloo's own abort does not end a wait for a message (torch 2.15), and its connections stay open as long as any work
# of
#   the group is referenced. So the connections are shut down at the socket, which the group sees as the end of its
#   peers.
#   gloo does not name its sockets: they are those that have appeared in /proc/self/fd while the group was formed.
# - The wait for the rest of a message that is under way does not even end with its socket: see `waits.py`.
# - The count of process groups that a process has formed is part of the keys with which ranks find each other in the
#   store. A start that failed has counted too, and only on some ranks.
# - The destructor of a group can block forever after a peer has died.
#
# Nothing here imports torch before a group is formed.


DESCRIPTORS = "/proc/self/fd"


class Connections:
    """The sockets of one group."""

    def __init__(self) -> None:
        self.sockets: set[tuple[int, int]] = set()  #: Descriptor and inode of each.
        self.has_ended = False  #: Whether this process has ended the group.

    def end(self) -> None:
        """Shut them down."""
        self.has_ended = True
        for descriptor, inode in list(self.sockets):
            # It may be closed, and its number used again.
            # Of a duplicate: the socket object closes it, and torch's own descriptor stays open.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if os.fstat(connection.fileno()).st_ino == inode and not is_listening:
                    connection.shutdown(socket.SHUT_RDWR)

    def is_silent(self) -> bool:
        """Return whether nothing more can arrive, after `end`."""
        self.end()  # also those that were added after it
        for descriptor, inode in list(self.sockets):
            unread = array.array("i", [0])
            with suppress(OSError):  # it is closed
                fcntl.ioctl(descriptor, termios.FIONREAD, unread)
                if unread[0] and os.fstat(descriptor).st_ino == inode:
                    return False
        return True


_present = Connections()


def can_end_groups() -> bool:
    """Return whether this system shows a process its own sockets; macOS and some containers do not."""
    return os.path.isdir(DESCRIPTORS)


def open_sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of each socket of this process."""
    found = set()
    for name in os.listdir(DESCRIPTORS):
        with suppress(OSError):  # the descriptor of the folder itself is closed by now
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def add_sockets(before: set[tuple[int, int]]) -> None:
    """Count the sockets that were opened since `open_sockets` returned `before` among the present group's."""
    _present.sockets.update(open_sockets() - before)


def present_group() -> Connections:
    """Return the connections of the present group."""
    return _present


def end_group() -> None:
    """End the present group from any thread: blocked calls of this process and of its peers raise an error."""
    _present.end()


def forget_group() -> None:
    """Forget the sockets of the group that has ended. Calls that still wait in it keep them."""
    global _present
    _present = Connections()


def count_groups_from_0() -> None:
    """Start the count of process groups again, so that it is equal on all ranks of the next group."""
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = 0


def groups() -> list[Any]:
    """Return the process groups of this process."""
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_map)


def drop_last(kept: list[Any]) -> None:
    """Wait until nothing else refers to these objects, and drop them in this thread."""
    while kept:
        time.sleep(0.1)
        # Those of the list, of the loop and of the call.
        kept[:] = [each for each in kept if sys.getrefcount(each) > 3]


# Wait for other ranks, in a world whose members may change, and end the wait soon after its group has ended.
#
# When a connection ends, gloo ends the waits for messages on it, but not for one that is under way: a rank that waits
# for the rest of a message from a rank that was killed, or has sent it a part, stays there until the group's timeout.
# torch 2.15 has no call that ends such a wait. So another thread makes the call, and this one can leave it:
#
#     this thread      call | ............ the answer; or ViewEnded, once nothing can arrive any more
#     another thread        | native wait; if it is left there, it ends with the group's timeout
#     watch thread                     end_group()


T = TypeVar("T")
# How long gloo may take to end a wait with an error of its own.
OWN_END_S = 0.2


def wait_for_peers(membership: Membership | None, call: Callable[[], T]) -> T:
    """Make a call that waits for other ranks. Without a `membership`, the launcher ends all processes after a loss.

    Raises:
        ViewEnded: The group has ended, and the call still waits.
    """
    if membership is None:
        return call()
    # Now: a thread that reduces during backward may still wait when the main thread forms the next group.
    group = present_group()
    # Used again, since starting one takes 0.1 ms. A list's `append` and `pop` are atomic.
    thread = membership.idle.pop() if membership.idle else CallThread()
    thread.calls.put(call)
    ended_at = None
    while True:
        try:
            answer, error = thread.answers.get(timeout=WATCH_S)
            break
        except queue.Empty:
            now = time.monotonic()
            ended_at = (ended_at or now) if group.has_ended else None
            # Not before: what arrives late would be written into memory that is used again.
            if ended_at is not None and now - ended_at > OWN_END_S and group.is_silent():
                thread.calls.put(None)
                # is_lost_peer() looks for the word gloo.
                raise ViewEnded(
                    "the group has ended, and gloo waits for the rest of a message"
                ) from None
    membership.idle.append(thread)
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
