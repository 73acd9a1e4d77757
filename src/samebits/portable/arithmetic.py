"""Whether this process computes in portable arithmetic (`kernels=portable`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from samebits.portable.floats import in_python_math
from samebits.portable.initializers import in_torch_init
from samebits.portable.listing import LIST_OPERATIONS, ListingMode
from samebits.portable.mode import PortableMode

VERSION = "portable v1"

_entered: ExitStack | None = None  # by the thread that trains


class _Here(threading.local):
    depth = 0  # contexts that this thread is in


_here = _Here()


@contextmanager
def portable_arithmetic(mode: PortableMode | None = None) -> Iterator[None]:
    """Compute in portable arithmetic in this thread.

    Args:
        mode: What replaces the operations; None: refuse those that have no portable form.

    Raises:
        ConfigError: Inside, at an operation that has no portable form.
    """
    # Fused attention and encoder layers are one operation each; without them, they are products and softmax.
    is_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # The LSTM and GRU of oneDNN and cuDNN are one operation too; torch's own are products and gates.
    is_mkldnn, is_cudnn = torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled
    torch._C._set_mkldnn_enabled(False)
    torch.backends.cudnn.enabled = False
    _here.depth += 1
    try:
        with sdpa_kernel(SDPBackend.MATH), in_python_math(), in_torch_init(), mode or PortableMode():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
        torch._C._set_mkldnn_enabled(is_mkldnn)
        torch.backends.cudnn.enabled = is_cudnn
        _here.depth -= 1


def is_portable() -> bool:
    """Return whether this thread computes in portable arithmetic."""
    return _here.depth > 0


def in_this_arithmetic(body: Callable[[], None]) -> Callable[[], None]:
    """Return a function that computes in another thread as this process does: a mode belongs to a thread."""
    if _entered is None:
        return body

    def run() -> None:
        with portable_arithmetic():
            body()

    return run


def use_portable_arithmetic(on: bool) -> None:
    """Compute in portable arithmetic from now on in this thread, or as torch does."""
    global _entered
    if on and _entered is None:
        _entered = ExitStack()
        _entered.enter_context(portable_arithmetic(ListingMode() if LIST_OPERATIONS in os.environ else None))
    elif not on and _entered is not None:
        _entered.close()
        _entered = None
