"""Memory of the process: pauses of the garbage collector, and when the C library returns freed memory to the system."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Pause Python's garbage collection while many objects are created of which none is garbage.


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing in a block: collections would look through its new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# When the C library returns freed memory to the system. glibc only; elsewhere nothing happens.
#
# By default glibc returns it as soon as 128 KB to 64 MB are free at the end of its heap, and each block above 32 MB at
# once. A training step frees its activations, and the next one gets the same memory again, page by page, filled with
# zeros.


# from glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
KEEP_BYTES = 512 * 1024 * 1024
KEEP_BLOCK_BYTES = 256 * 1024 * 1024
OLD_BLOCK_BYTES = 32 * 1024 * 1024  # HEAP_MAX_SIZE / 2 of 64-bit systems
RETURN_BYTES = RETURN_BLOCK_BYTES = 256 * 1024


def keep_freed_memory() -> None:
    """Keep up to 512 MB of freed memory, and blocks of up to 256 MB, for the next step.

    Threads that start later share it. By default each has an arena of its own, so the memory that one frees, as a
    micro-batch of `batch_norm=sync`, is not for the others.

    Settings of the user (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) stay.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if not is_set and "malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        _set(KEEP_BYTES, KEEP_BLOCK_BYTES, is_shared=True)


def return_freed_memory() -> None:
    """Return each freed large block to the system.

    By default glibc raises its threshold with each such block and keeps them fragmented, far above what is in use.
    """
    _set(RETURN_BYTES, RETURN_BLOCK_BYTES)


def _set(trim_bytes: int, block_bytes: int, *, is_shared: bool = False) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Old versions of glibc refuse more than 32 MB. Setting one threshold ends the adapting of both. With the
    # second one alone, every block above 128 KB would be returned at once.
    if mallopt and (
        mallopt(M_MMAP_THRESHOLD, block_bytes) or mallopt(M_MMAP_THRESHOLD, OLD_BLOCK_BYTES)
    ):
        mallopt(M_TRIM_THRESHOLD, trim_bytes)
        if is_shared:
            mallopt(M_ARENA_MAX, 1)
