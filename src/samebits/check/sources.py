"""Trace what a recipe reads beside its arguments: the clock, entropy, process ids, ranks, workers, hashes.

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
from types import FrameType
from typing import Any

import torch

from samebits.frames import is_user, user_line

CLOCK, ENTROPY, PROCESS, RANK, WORKER, HASH, ITERATOR = (
    "clock", "entropy", "process", "rank", "worker", "hash", "iterator",
)  # fmt: skip
_CLOCKS = (
    time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns,
    time.process_time, time.localtime, time.gmtime, time.ctime,
)  # fmt: skip
_PROCESSES = (os.getpid, os.getppid, threading.get_ident, threading.get_native_id, socket.gethostname)
_BUILTINS: dict[Any, str] = {
    **dict.fromkeys(_CLOCKS, CLOCK),
    **dict.fromkeys((os.urandom, os.getrandom), ENTROPY),
    **dict.fromkeys(_PROCESSES, PROCESS),
}
# Called by many libraries without a bearing on the result, so only the user's own calls count.
_DIRECT: dict[Any, str] = {builtins.hash: HASH, builtins.id: PROCESS, builtins.next: ITERATOR}
_PYTHON = {
    torch.utils.data.get_worker_info.__code__: (WORKER, "torch.utils.data.get_worker_info()"),
    torch.distributed.is_initialized.__code__: (RANK, "torch.distributed.is_initialized()"),
    torch.seed.__code__: (ENTROPY, "torch.seed()"),
}
_RANKS = {getattr(torch.distributed, f"get_{name}").__code__: name for name in ("rank", "world_size")}
_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})


@dataclass(frozen=True)
class NoiseSource:
    """Something that a recipe read beside its arguments."""

    kind: str  #: One of the constants of this module.
    phase: str  #: What the recipe was doing: "import", "build", "sample", "forward" ...
    what: str  #: What it called: "time.time()".
    file: str  #: The user's source file.
    line: int  #: The line in it.


class SourceTracer:
    """Records the sources that a block of code reads."""

    def __init__(self) -> None:
        self.phase = ""  #: What is running now.
        self.found: dict[NoiseSource, None] = {}  #: The sources, each once.

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Trace a block of code as a phase."""
        before, self.phase = self.phase, phase
        # A profile function sees calls of C functions such as time.time, which a trace function does not.
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.phase = before

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            kind, what = _of_builtin(frame, argument)
        elif event == "call":
            kind, what = _of_function(frame)
        else:
            return
        if kind:
            line = user_line(frame)
            if line is not None:
                self.found.setdefault(NoiseSource(kind, self.phase, what, *line))


def _of_builtin(frame: FrameType, called: Any) -> tuple[str, str]:
    try:
        kind = _BUILTINS.get(called, "")
        if not kind and called in _DIRECT and is_user(frame.f_code.co_filename):
            kind = _DIRECT[called]
    except TypeError:  # a method of an object that has no hash
        return "", ""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    # By identity: an object may define its own ==.
    if (owner is datetime.datetime or owner is datetime.date) and name in ("now", "utcnow", "today"):
        return CLOCK, f"datetime.{name}()"
    if isinstance(owner, torch.Generator) and name == "seed":
        return ENTROPY, "torch.Generator.seed()"
    module = getattr(called, "__module__", "")
    prefix = {"posix": "os.", "time": "time.", "_thread": "threading.", "_socket": "socket."}.get(module, "")
    return kind, f"{prefix}{name}()"


def _of_function(frame: FrameType) -> tuple[str, str]:
    code = frame.f_code
    if code in _PYTHON:
        return _PYTHON[code]
    if code in _RANKS:
        return RANK, f"torch.distributed.get_{_RANKS[code]}()"
    if code is os.environ.__getitem__.__func__.__code__:  # type: ignore[attr-defined]  # it is a Python method
        name = str(frame.f_locals.get("key"))
        return (RANK, f"os.environ[{name!r}]") if name in _VARIABLES else ("", "")
    if code is random.Random.seed.__code__ and frame.f_locals.get("a") is None:
        return ENTROPY, "random.Random() without a seed"
    return "", ""
