"""Which CPU cores this process and its threads may use, and how many of them other programs keep busy."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Other load from which measurements are not reliable, as a share of the cores.
NOTABLE_LOAD = 0.25
GLOO_THREAD = "gloo_tcp_loop"


def num_cores() -> int:
    """Count the CPU cores this process may run on.

    On Linux these are the cores of its affinity mask (`taskset`, Slurm, cpusets); elsewhere (macOS) all cores of the
    machine.
    """
    return len(core_ids()) or os.cpu_count() or 1


def core_ids() -> set[int]:
    """Return the cores of this process's affinity mask; none where the system has no such mask (macOS)."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and threads that it starts meanwhile, on one core; no effect where there are no masks (macOS).

    For threads that pass control to each other: waking one on another core takes longer.
    """
    before = core_ids()
    if before:
        # Not the first core in all processes.
        os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def place_gloo_threads(local_rank: int, threads_per_rank: int = 1) -> list[int]:
    """Keep this process's gloo threads on one core, as batch threads; no effect where the system has no /proc (macOS).

    gloo has one thread for its TCP connections, woken by each message. Where it took the main thread's core in the
    middle of a send, it was measured to run until its time slice ended, 3 to 5 ms: probably it tries again and again to
    lock the connection, which the main thread holds. A batch thread waits until the main thread waits.

    The system also starts a woken thread near the thread that wakes it. With gloo's thread on a core of its rank, the
    main thread starts there. Otherwise two ranks often share a core while another one is idle, again until a time
    slice ends. `python -m benchmarks.exact_cost` measures both.

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
                if (thread / "comm").read_text(encoding="utf-8").strip() == GLOO_THREAD:
                    os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
                    os.sched_setaffinity(int(thread.name), {core})
                    placed.append(int(thread.name))
    return placed


def describe_other_load(seconds: float = 0.5) -> tuple[str, bool]:
    """Measure how busy this process's cores are with other programs.

    Args:
        seconds: Duration of the measurement.

    Returns:
        A text such as "other programs use 1.4 of 2 cores", empty where the system does not count (no /proc/stat); and
        whether that is notable.
    """
    own, before = time.process_time(), _busy_seconds()
    time.sleep(seconds)
    after, own = _busy_seconds(), time.process_time() - own
    if before is None or after is None:
        return "", False
    total = num_cores()
    busy = min(max((after - before - own) / seconds, 0.0), total)
    return f"other programs use {busy:.1f} of {total} core{'s' if total > 1 else ''}", busy > NOTABLE_LOAD * total


def _busy_seconds() -> float | None:
    """Return the seconds that this process's cores were not idle since the system started."""
    try:
        lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split()[1:] for line in lines if line.split()[0] in names]
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = sum(sum(map(int, row[:8])) - int(row[3]) - int(row[4]) for row in rows)
        return ticks / os.sysconf("SC_CLK_TCK") if rows else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None
