"""Whether this process computes in portable arithmetic (`kernels=portable`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes  # no public name

from samebits.errors import ConfigError
from samebits.portable.floats import in_python_math
from samebits.portable.mode import LIST_OPERATIONS, PortableMode
from samebits.portable.randomness import in_torch_init

VERSION = "portable v1"

_entered: ExitStack | None = None  # by the thread that trains
_set_flush_denormal = torch.set_flush_denormal
_set_num_threads = torch.set_num_threads
_use_deterministic_algorithms = torch.use_deterministic_algorithms


class _Here(threading.local):
    depth = 0  # contexts that this thread is in


_here = _Here()


class _Switches:
    """torch's and Python's switches for the whole process: the first thread that enters sets them, the last resets."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._threads = 0
        self._resets = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._threads:
                self._set()
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._resets.close()

    def _set(self) -> None:
        # Fused attention and encoder layers are one operation each; without them, they are products and softmax.
        self._resets.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        # Not by sdpa_kernel(): it can be left only in the thread that entered it, and the last thread may be another.
        attention = torch.backends.cuda  # of the CPU too
        for name in ("flash", "mem_efficient", "cudnn", "math"):
            enable: Callable[[bool], None] = getattr(attention, f"enable_{name}_sdp")
            self._resets.callback(enable, getattr(attention, f"{name}_sdp_enabled")())
            enable(name == "math")
        # The LSTM and GRU of oneDNN and cuDNN are one operation too; torch's own are products and gates.
        self._resets.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        # The order of products of three factors would depend on whether a package is installed.
        for switches, name in (
            (torch.backends.cudnn, "enabled"),
            (torch.backends.opt_einsum, "enabled"),
        ):
            self._resets.callback(setattr, switches, name, getattr(switches, name))
            setattr(switches, name, False)
        self._resets.enter_context(_in_fixed_order())
        self._resets.enter_context(in_python_math())
        self._resets.enter_context(in_torch_init())
        for name, function in (
            ("set_flush_denormal", _keep_denormal),
            ("set_num_threads", _set_checked_threads),
        ):
            self._resets.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, function)


_switches = _Switches()


def _keep_denormal(mode: bool) -> bool:
    if mode:
        raise ConfigError(
            "torch.set_flush_denormal(True) has no portable form",
            cause="It belongs to a thread, so results would depend on the number of threads.",
            fix="Remove the call, or set kernels=auto.",
        )
    return True


@contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Keep torch's deterministic mode on: else its threads race to write to equal places (`index_put`, `index_copy`).

    Afterwards it is as the script set it last.
    """
    is_on = torch.are_deterministic_algorithms_enabled()

    def keep_on(mode: bool, *, warn_only: bool = False) -> None:
        nonlocal is_on
        is_on = mode
        _use_deterministic_algorithms(True, warn_only=warn_only)

    _use_deterministic_algorithms(True)
    function = torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms = keep_on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms = function
        _use_deterministic_algorithms(is_on)


def _set_checked_threads(num_threads: int) -> None:
    """`torch.set_num_threads`. Threads that were idle since before may have a flag that flushes denormal numbers."""
    _set_num_threads(num_threads)
    if is_portable():
        _check_denormal_numbers()


def _check_denormal_numbers() -> None:
    """Check the threads that torch has for this one: they inherit its flag when they start, also from libraries.

    Each thread of the script has others, and each of these gets an equal share of so many values.
    """
    smallest = torch.full((torch.get_num_threads() << 15,), 1e-40)
    if not bool((smallest * 1.0).all()):
        raise ConfigError(
            "a thread of torch computes without denormal numbers, which has no portable form",
            cause="torch.set_flush_denormal(True) was called before torch started its threads, or a library does so.",
            fix="Remove the call, or set kernels=auto.",
        )


@contextmanager
def portable_arithmetic(mode: PortableMode | None = None) -> Iterator[None]:
    """Compute in portable arithmetic in this thread.

    Args:
        mode: What replaces the operations; None: refuse those that have no portable form, or list them where the
            process is asked to.

    Raises:
        ConfigError: Inside, at an operation that has no portable form.
    """
    with _switches(), mode or PortableMode(lists=LIST_OPERATIONS in os.environ):
        if not _here.depth:
            _set_flush_denormal(False)  # of this thread
            _check_denormal_numbers()
        _here.depth += 1
        try:
            yield
        finally:
            _here.depth -= 1


def is_portable() -> bool:
    """Return whether this thread computes in portable arithmetic."""
    return _here.depth > 0


def in_this_arithmetic(body: Callable[[], None]) -> Callable[[], None]:
    """Return a function that computes in another thread as this process does: a mode belongs to a thread."""
    is_on = _entered is not None

    def run() -> None:
        if is_on == is_portable():
            body()
        elif is_on:
            with portable_arithmetic():
                body()
        else:  # a thread that is kept from before
            with _disable_current_modes():
                body()

    return run


@contextmanager
def _in_new_threads() -> Iterator[None]:
    """Let each thread that starts compute as this process does, those of executors too."""
    start = threading.Thread.start

    def start_in_this_arithmetic(thread: threading.Thread) -> None:
        thread.run = in_this_arithmetic(thread.run)  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_this_arithmetic  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def use_portable_arithmetic(on: bool) -> None:
    """Compute in portable arithmetic from now on in this thread and those that it starts, or as torch does."""
    global _entered
    if on and _entered is None:
        with ExitStack() as entered:
            entered.enter_context(portable_arithmetic())
            entered.enter_context(_in_new_threads())
            _entered = entered.pop_all()
    elif not on and _entered is not None:
        _entered.close()
        _entered = None
