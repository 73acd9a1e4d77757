"""Memory that a step frees: kept for the next step, or returned to the system."""

import ctypes
import os
import subprocess
import sys

import pytest

from samebits import host_memory

has_mallopt = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")
pytestmark = pytest.mark.skipif(not has_mallopt, reason="the C library has no mallopt (glibc only)")

# Allocates 120 MB of tensors and frees them, three times. Prints the pages that the last time took from the system, and
# what is left of the 120 MB, in MB.
PROGRAM = """
import resource
import sys
import threading
from pathlib import Path
import torch
from samebits import host_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def in_thread():
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()

def allocate():
    tensors = [torch.ones(5_000_000) for _ in range(6)]
    while tensors:
        tensors.pop()

where, *names = sys.argv[1:]
for name in names:
    getattr(host_memory, name)()
torch.set_num_threads(1)
torch.ones(5_000_000)
before = resident()
allocate()
allocate()
count = faults()
in_thread() if where == "thread" else allocate()
print(faults() - count, resident() - before)
"""


def allocate(*calls: str, where: str = "main", **environment: str) -> tuple[int, float]:
    """Run the program after these functions of `host_memory`, the last time in the main thread or in a new one."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUN"))}
    command = [sys.executable, "-c", PROGRAM, where, *calls]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True, timeout=180)
    num_faults, left = done.stdout.split()
    return int(num_faults), float(left)


def test_the_next_step_finds_the_memory_that_the_last_one_freed() -> None:
    # Not compared with glibc's own choice, which differs from one start to the next.
    returned, rest = allocate("keep_freed_memory", "return_freed_memory")
    kept, left = allocate("keep_freed_memory")
    assert kept < returned / 2
    assert rest < 40
    assert left > 80


@pytest.mark.full
def test_another_thread_finds_it_too() -> None:
    returned, _ = allocate("keep_freed_memory", "return_freed_memory", where="thread")
    kept, left = allocate("keep_freed_memory", where="thread")
    assert kept < returned / 2
    assert left > 80


def test_an_old_glibc_keeps_blocks_of_32_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class OldLibrary:
        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return int(parameter != host_memory.M_MMAP_THRESHOLD or value <= 2**25)

    for name in [*os.environ]:
        if name.startswith(("MALLOC_", "GLIBC_TUN")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: OldLibrary())
    host_memory.keep_freed_memory()
    assert calls[1:] == [
        (host_memory.M_MMAP_THRESHOLD, 2**25), (host_memory.M_TRIM_THRESHOLD, host_memory.KEEP_BYTES),
        (host_memory.M_ARENA_MAX, 1),
    ]  # fmt: skip


def test_nothing_happens_with_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[str] = []

    class OtherLibrary:
        def __getattr__(self, name: str) -> object:
            looked_for.append(name)
            raise AttributeError(name)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: OtherLibrary())
    host_memory.return_freed_memory()
    assert looked_for == ["mallopt"]


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_MMAP_THRESHOLD_", "200000"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=200000")]
)
def test_settings_of_the_user_stay(name: str, value: str) -> None:
    assert allocate("keep_freed_memory", **{name: value})[1] < 40
