"""Where gloo's threads run: on a core of their rank, and never in place of a thread that computes.

gloo has one thread for its TCP connections. It is woken by each message, and skips a connection that the main thread
uses at that moment, to look at it again at once. If it has taken the main thread's core in the middle of a send, it
repeats this until its time slice ends, 3 to 5 ms later. As a batch thread it waits until the main thread waits.

The system also starts a woken thread near the thread that wakes it. With gloo's thread on a core of its rank, the main
thread starts there. Otherwise two ranks often share a core while another one is idle, again until a time slice ends.
`python -m benchmarks.exact_cost` measures both.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lockstep.cores import core_ids

_NAME = "gloo_tcp_loop"


def place_gloo_threads(local_rank: int, threads_per_rank: int = 1) -> list[int]:
    """Keep this process's gloo threads on one core, as batch threads; no effect where the system has no /proc (macOS).

    Args:
        local_rank: Rank among the processes of this machine.
        threads_per_rank: Threads with which each of them computes.

    Returns:
        The ids of the threads.
    """
    cores = sorted(core_ids())
    placed: list[int] = []
    if not cores or not hasattr(os, "SCHED_BATCH"):
        return placed
    core = cores[local_rank * threads_per_rank % len(cores)]
    # A thread can end meanwhile, and a container can forbid the calls.
    with suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                if (thread / "comm").read_text(encoding="utf-8").strip() == _NAME:
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
                    os.sched_setaffinity(int(thread.name), {core})
                    placed.append(int(thread.name))
    return placed
