"""The end of a process whose main thread does not come to one. Nothing here imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from lockstep.errors import LockstepError

_tell: Callable[[LockstepError], object] | None = None


def tell_by(tell: Callable[[LockstepError], object]) -> None:
    """Somebody else says how this process has ended: its launcher."""
    global _tell
    _tell = tell


def end(error: LockstepError) -> NoReturn:
    """End this process at once, from any thread, with an error's text and exit code."""
    if _tell is not None:
        _tell(error)
    else:
        # A closed pipe is no reason to stay.
        with suppress(OSError, ValueError):
            print(f"\n{error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
