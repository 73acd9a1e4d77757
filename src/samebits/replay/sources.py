"""What a recipe reads beside its arguments: the clock, entropy, process ids, ranks, workers, hashes.

`sys.setprofile` reports each call of a Python or C function in this thread. A source explains a difference that was
observed; on its own it is no fault, since a recipe may read the clock for a log line.
"""

import builtins
import datetime
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from samebits.frames import is_user, user_line

CLOCK, ENTROPY, PROCESS, RANK, WORKER, HASH, ITERATOR, MERGE = (
    "clock", "entropy", "process", "rank", "worker", "hash", "iterator", "metric merge",
)  # fmt: skip
_NAMES: tuple[tuple[str, Any, str], ...] = (
    (CLOCK, time, "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time"),
    (CLOCK, time, "localtime gmtime ctime"),
    (CLOCK, datetime.datetime, "now utcnow today"),
    (CLOCK, datetime.date, "today"),
    (ENTROPY, os, "urandom getrandom"),
    (ENTROPY, torch, "seed"),
    (PROCESS, os, "getpid getppid"),
    (PROCESS, threading, "get_ident get_native_id"),
    (PROCESS, socket, "gethostname"),
    (RANK, torch.distributed, "is_initialized get_rank get_world_size"),
    (WORKER, torch.utils.data, "get_worker_info"),
    (HASH, builtins, "hash"),
    (PROCESS, builtins, "id"),
    (ITERATOR, builtins, "next"),
)
# C functions, and the code of Python functions -> kind, and the call as the user reads it.
_SOURCES: dict[Any, tuple[str, str]] = {
    getattr(getattr(owner, name), "__code__", getattr(owner, name)): (
        kind,
        f"{owner.__name__}.{name}()".removeprefix("builtins."),
    )
    for kind, owner, names in _NAMES
    for name in names.split()
}
# Called by many libraries without a bearing on the result, so only the user's own calls count.
_DIRECT = (builtins.hash, builtins.id, builtins.next)
_READ_VARIABLE: CodeType = os.environ.__getitem__.__func__.__code__  # type: ignore[attr-defined]  # it is a Python method
_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
)


@dataclass(frozen=True)
class Suspect:
    """Something that a recipe reads or keeps, so that a result may differ.

    Attributes:
        kind: A constant of `sources`, `state` or `cause`.
        what: The call, or the path of the state.
        file: The user's source file; empty if it is not known.
        line: The line in it.
        phase: What the recipe was doing: "import", "build", "forward" ...
    """

    kind: str
    what: str
    file: str = ""
    line: int = 0
    phase: str = ""


class SourceTracer:
    """Records the sources that a block of code reads."""

    def __init__(self) -> None:
        self.phase = ""  #: What is running now.
        self.found: dict[Suspect, None] = {}  #: The sources, each once.

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Trace a block of code as a phase."""
        self.phase = phase
        # A profile function sees calls of C functions such as time.time, which a trace function does not.
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        called = argument if event == "c_call" else frame.f_code
        try:
            source = _SOURCES.get(called) or _by_arguments(frame, called)
        except TypeError:  # a method of an object that has no hash
            return
        if source is None or (called in _DIRECT and not is_user(frame.f_code.co_filename)):
            return
        line = user_line(frame)
        if line is not None:
            self.found.setdefault(Suspect(*source, *line, self.phase))


def _by_arguments(frame: FrameType, called: Any) -> tuple[str, str] | None:
    """Return kind and call of a function that is a source with certain arguments only, or by its name."""
    if called is _READ_VARIABLE and frame.f_locals.get("key") in _VARIABLES:
        return RANK, f"os.environ[{frame.f_locals['key']!r}]"
    if called is random.Random.seed.__code__ and frame.f_locals.get("a") is None:
        return ENTROPY, "random.Random() without a seed"
    if getattr(called, "co_name", "") == "merge" and is_user(called.co_filename):
        return MERGE, called.co_qualname
    owner = getattr(called, "__self__", None)
    if isinstance(owner, torch.Generator) and called.__name__ == "seed":
        return ENTROPY, "torch.Generator.seed()"
    return None
