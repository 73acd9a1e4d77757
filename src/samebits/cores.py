"""Which CPU cores this process and its threads may use, and how many of them other programs keep busy."""

import ctypes
import glob
import os
import platform
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# Other load from which measurements are not reliable, as a share of the cores.
NOTABLE_LOAD = 0.25
GLOO_THREAD = "gloo_tcp_loop"
# Between two exchanges of gradients, and between two layers of synchronized batch norm: a ResNet-18 has 40 exchanges a
# step. Beside other programs, a thread with a longer time slice waits longer for its turn, at each exchange.
TIME_SLICE_MS = 4.0
LAYER_TIME_SLICE_MS = 10.0
# Number of the system call that sets a time slice: Python has no function for it, glibc has one since 2.41.
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def num_cores() -> int:
    """Count the CPU cores this process may run on.

    On Linux these are the cores of its affinity mask (`taskset`, Slurm, cpusets); elsewhere (macOS) all cores of the
    machine.
    """
    return len(core_ids()) or os.cpu_count() or 1


def core_ids() -> set[int]:
    """Return the cores of this process's affinity mask; none where the system has no such mask (macOS)."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Without torch, whose import takes longer than what is decided by their number.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [
            name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"
        ]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def schedule_threads(local_rank: int, threads_per_rank: int = 1) -> None:
    """Place this process's gloo threads, and give this thread and those that it starts longer time slices."""
    set_time_slice(TIME_SLICE_MS)
    place_gloo_threads(local_rank, threads_per_rank)


def set_time_slice(milliseconds: float) -> None:
    """Set how long this thread, and threads that it starts from now on, keep a core before another thread's turn.

    When a message wakes gloo's thread on the core of a thread that computes, and the time slice of that one is over
    (1.4 ms on two cores), the system changes threads at once. The wait for the message ends no earlier, but the
    computation does later. Linux 6.12 and later have settable time slices; elsewhere there is no effect.

    Args:
        milliseconds: 0.1 to 100; 0 for the system's own.
    """
    number = SCHED_SETATTR.get(platform.machine())
    has_calls = sys.platform == "linux" and hasattr(os, "sched_getscheduler")
    if number is None or not has_calls or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    # struct sched_attr: size, policy, flags, nice, priority, then runtime, deadline and period in nanoseconds.
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack(
        "IIQiIQQQ", 48, os.SCHED_OTHER, 0, niceness, 0, round(milliseconds * 1e6), 0, 0
    )
    # a container can forbid it: nothing changes then
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


@contextmanager
def time_slice(milliseconds: float) -> Iterator[None]:
    """Set this thread's time slice until the block ends. `milliseconds`: 0.1 to 100."""
    set_time_slice(milliseconds)
    try:
        yield
    finally:
        set_time_slice(TIME_SLICE_MS)


def place_gloo_threads(local_rank: int, threads_per_rank: int = 1) -> list[int]:
    """Keep this process's gloo threads on one core, as batch threads; no effect where the system has no /proc (macOS).

    gloo has one thread for its TCP connections, woken by each message. Where it took the main thread's core in the
    middle of a send, it was measured to run until its time slice ended, 3 to 5 ms: probably it tries again and again to
    lock the connection, which the main thread holds. A batch thread waits until the main thread waits.

    The system also starts a woken thread near the thread that wakes it. With gloo's thread on a core of its rank, the
    main thread starts there. Otherwise two ranks often share a core while another one is idle, again until a time
    slice ends. `python -m benchmarks.exact_cost` measures both.

    Returns:
        The ids of the threads.
    """
    cores = sorted(core_ids())
    placed: list[int] = []
    if not cores or not hasattr(os, "sched_setscheduler"):
        return placed
    core = cores[local_rank * threads_per_rank % len(cores)]
    for thread in gloo_threads():
        with suppress(OSError):  # it has ended, or a container forbids the calls
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.sched_setaffinity(thread, {core})
            placed.append(thread)
    return placed


def let_gloo_threads_preempt(num_threads: int) -> None:
    """Let gloo's threads take a core from the main thread, for a model that waits for messages at each of its layers.

    With fewer cores than threads nothing changes: a rank's gloo thread would take a core from the other ranks.

    As batch threads they would wait until the main thread waits or its time slice ends, the longer one of
    `LAYER_TIME_SLICE_MS`. They would then often start in the middle of its next send.
    """
    if num_threads > num_cores():
        return
    for thread in gloo_threads():
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def gloo_threads() -> list[int]:
    """Return the ids of this process's gloo threads, one for each of its gloo groups."""
    found: list[int] = []
    with suppress(OSError):  # no /proc (macOS)
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread can end meanwhile
                if (thread / "comm").read_text(encoding="utf-8").strip() == GLOO_THREAD:
                    found.append(int(thread.name))
    return found


def describe_other_load(seconds: float = 0.5) -> tuple[str, bool]:
    """Measure how busy this process's cores are with other programs.

    Returns:
        A text such as "other programs use 1.4 of 2 cores", empty where the system does not count (no /proc/stat); and
        whether that is notable.
    """
    own = time.process_time()
    before = _busy_seconds()
    time.sleep(seconds)
    after = _busy_seconds()
    own = time.process_time() - own
    if before is None or after is None:
        return "", False
    total = num_cores()
    busy = min(max((after - before - own) / seconds, 0.0), total)
    return (
        f"other programs use {busy:.1f} of {total} core{'s' if total > 1 else ''}",
        busy > NOTABLE_LOAD * total,
    )


def _busy_seconds() -> float | None:
    """Return the seconds that this process's cores were not idle since the system started."""
    try:
        cores = os.sched_getaffinity(0)
        times = psutil.cpu_times(percpu=True)
        # guest time is a part of user time, so `sum` would count it twice
        rows = [times[core] for core in cores if core < len(times)]
        return sum(sum(row[:8]) - row.idle - row.iowait for row in rows) if rows else None
    except (OSError, psutil.Error, AttributeError):
        return None
