"""Calls to the store at which launchers meet. Any of them may wait for ever, so each has a thread and a limit."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousError

from lockstep.cluster.timeout import REPORT_EVERY_S, as_clock, call_with_timeout
from lockstep.config.process_range import RendezvousConfig
from lockstep.errors import LaunchError
from lockstep.open_files import out_of_files

T = TypeVar("T")

# How long a question to the store may take. Over a link that was cut there is never an answer.
ANSWER_S = 5.0


class StoreCalls:
    """The calls of one launcher.

    Args:
        nodes: Which machines meet, and where.
        check: Called often while it waits; raises to end the wait.
        say: Gets a text every few seconds while somebody is missing.
    """

    def __init__(self, nodes: RendezvousConfig, check: Callable[[], None], report: Callable[[str], None]) -> None:
        self._nodes, self._check, self._report = nodes, check, report

    def lost_store(self, reason: str) -> LaunchError:
        """The store does not answer any more."""
        return LaunchError(
            f"node {socket.gethostname()} has lost the rendezvous at {self._nodes.endpoint}: {reason}",
            cause=out_of_files() or "that machine or the network to it is down",
            fix="when it is back, start the same command on all machines, with --resume auto",
        )

    def query(self, question: Callable[[], T], limit_s: float = ANSWER_S) -> T | None:
        """An answer of the store, or None where there is none."""
        try:
            return call_with_timeout(question, limit_s, lambda waited_s: None)
        except (RendezvousError, dist.DistError, TimeoutError):
            return None

    def wait(self, call: Callable[[], T], limit_s: float, state: Callable[[], str] | None = None) -> T:
        """An answer that may take long; meanwhile `check` is called, and `say` with the state.

        Raises:
            LaunchError: There is none within the limit.
        """
        next_report_s = REPORT_EVERY_S

        def tick(waited_s: float) -> None:
            nonlocal next_report_s
            self._check()
            if state is not None and waited_s >= next_report_s:
                next_report_s += min(next_report_s, 60.0)
                left = as_clock(self._nodes.join_timeout_s - waited_s)
                self._report(f"{state()}, {waited_s:.0f} s\n  giving up in {left} (cluster.join_timeout_s)")

        try:
            return call_with_timeout(call, limit_s, tick)
        except TimeoutError:
            raise self.lost_store(f"no answer for {limit_s:.0f} s") from None
