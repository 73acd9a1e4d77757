"""A thread that advances the exchanges of a step while the main thread computes a backward pass.

    main thread    backward ... b0 start | backward ... b1 start | ... backward, last bucket start, finish: wait
    this thread                 b0: wait, add, second round | b0, b1: wait, add, ... | all are complete

The main thread starts each exchange, so that its first round is under way at once. This thread does the rest: buckets
that are complete early are summed over all ranks before the backward pass ends. torch's operations and waits release
the interpreter's lock, so the passes are not slowed down by it.

Which thread waits first decides nothing: a round waits only for messages that peers have posted after rounds before it.
"""

from __future__ import annotations

import queue
import threading
from typing import Protocol

from samebits.cluster.world import World


def is_worth_a_thread(world: World) -> bool:
    """Return whether a thread advances the exchanges of a world.

    Only with gloo, whose messages two threads may post: NCCL needs one order on all ranks. And only between machines:
    messages on one machine take less time than the thread's turns on the cores that compute.
    """
    return world.gloo_group is not None and world.num_hosts > 1


class Exchange(Protocol):
    """An all-reduce that has been started."""

    def advance(self) -> bool:
        """See `TreeAllReduce.advance`."""


class ExchangeThread:
    """A thread for the exchanges of one step.

    A new one for each step, in 0.1 ms: nothing is left behind when a step is dropped. It starts with the floating-point
    mode of the thread that starts it, so sums of tiny numbers have the same bits.
    """

    def __init__(self) -> None:
        self._started: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # A daemon: at the end of the process it may wait for a rank that is lost.
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def put(self, exchange: Exchange) -> None:
        """Advance an exchange until it is complete."""
        self._started.put(exchange)

    def finish(self) -> None:
        """Wait until all exchanges are complete.

        Raises:
            RuntimeError: Another rank is lost. The other exchanges have been dropped.
        """
        self._started.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        under_way: list[Exchange] = []
        is_last = False
        try:
            while under_way or not is_last:
                # What has been started meanwhile joins. Without anything under way, wait for it.
                while not (is_last or (under_way and self._started.empty())):
                    exchange = self._started.get()
                    if exchange is None:
                        is_last = True
                    else:
                        under_way.append(exchange)
                under_way = [exchange for exchange in under_way if not exchange.advance()]
        except BaseException as error:  # goes to the main thread
            self._error = error
