"""Wait for other ranks, in a world whose members may change, and end the wait soon after its group has ended.

When a connection ends, gloo ends the waits for messages on it, but not for one that is under way: a rank that waits for
the rest of a message from a rank that was killed, or has sent it a part, stays there until the group's timeout. torch
2.15 has no call that ends such a wait. So another thread makes the call, and this one can leave it:

    this thread      call | ............ the answer; or ViewEnded, once nothing can arrive any more
    another thread        | native wait; if it is left there, it ends with the group's timeout
    watch thread                     end_group()
"""

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from samebits.cluster.timeout import CallThread
from samebits.cluster.views import torch_traps
from samebits.cluster.views.membership import WATCH_S, Membership, ViewEnded

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
    group = torch_traps.present_group()
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
                raise ViewEnded("the group has ended, and gloo waits for the rest of a message") from None
    membership.idle.append(thread)
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
