"""How a function ends that has started processes, where a person or a scheduler has stopped them."""

from __future__ import annotations

import signal

from lockstep.launch.forkserver import LAUNCHER_ONLY


class Stopped(SystemExit, KeyboardInterrupt):
    """Ctrl-C, after the processes have ended. A script that does not catch it ends without a traceback."""


def raise_if_stopped(code: int) -> None:
    """End as what was launched has ended, if by a signal: nothing went wrong that could be told.

    Args:
        code: The launcher's exit code.

    Raises:
        Stopped: Ctrl-C.
        SystemExit: Another signal, such as SIGTERM.
    """
    if code - 128 in LAUNCHER_ONLY:
        raise (Stopped if code - 128 == signal.SIGINT else SystemExit)(code)
