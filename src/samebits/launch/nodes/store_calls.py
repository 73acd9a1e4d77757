"""Calls to the launchers' store. A call can block forever on a dead link, so each runs in a thread with a deadline."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from samebits.cluster.timeout import REPORT_EVERY_S, call_with_timeout
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError
from samebits.open_files import out_of_files

T = TypeVar("T")

# Deadline of a short call. Over a link that was cut, there is never an answer.
ANSWER_S = 5.0


class StoreCalls:
    """Calls to the store by one launcher.

    Args:
        check: Called often during a wait; raises to end it.
        report: Called with a text every few seconds while nodes are missing.
    """

    def __init__(self, nodes: RendezvousConfig, check: Callable[[], None], report: Callable[[str], None]) -> None:
        self._nodes, self._check, self._report = nodes, check, report

    def lost_store(self, reason: str) -> LaunchError:
        """Return the error for a store that does not answer any more."""
        return LaunchError(
            f"node {socket.gethostname()} has lost the rendezvous at {self._nodes.endpoint}: {reason}",
            cause=out_of_files() or "that machine or the network to it is down",
            fix="Once it is back, start the same command on all machines, with --resume auto.",
        )

    def query(self, call: Callable[[], T], limit_s: float = ANSWER_S) -> T | None:
        """Return the result of a short call; None if the store does not answer in time."""
        try:
            return call_with_timeout(call, limit_s, lambda waited_s: None)
        except (dist.DistError, TimeoutError):
            return None

    def wait(self, call: Callable[[], T], limit_s: float, state: Callable[[float], str] | None = None) -> T:
        """Return the result of a long call; meanwhile `check` runs, and the state is reported.

        Args:
            limit_s: Deadline, seconds.
            state: Returns what is being waited for, for the log, after so many seconds; None: do not log.

        Raises:
            LaunchError: No answer within the deadline.
        """
        next_report_s = REPORT_EVERY_S

        def tick(waited_s: float) -> None:
            nonlocal next_report_s
            self._check()
            if state is not None and waited_s >= next_report_s:
                # Doubled up to a minute: a machine may be missing for hours, and its log should stay short.
                next_report_s += min(next_report_s, 60.0)
                self._report(state(waited_s))

        try:
            return call_with_timeout(call, limit_s, tick)
        except TimeoutError:
            raise self.lost_store(f"no answer for {limit_s:.0f} s") from None
