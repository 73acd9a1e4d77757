"""Exit of a function whose processes were stopped by Ctrl-C or another signal."""

import signal

from samebits.cluster.signals import STOP_SIGNALS


class Stopped(SystemExit, KeyboardInterrupt):
    """Ctrl-C, raised after the processes have ended. A script that does not catch it exits without a traceback."""


def raise_if_stopped(code: int) -> None:
    """Raise the exit that matches a signal which ended the launched processes.

    Raises:
        Stopped: Ctrl-C.
        SystemExit: Another signal, such as SIGTERM.
    """
    if code - 128 in STOP_SIGNALS:
        raise (Stopped if code - 128 == signal.SIGINT else SystemExit)(code)
