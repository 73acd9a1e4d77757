"""Threads that advance the exchanges of a step while the main thread computes a backward pass.

    main thread    backward ... b0 start | backward ... b1 start | ... backward, last bucket start, finish: wait
    a thread                    b0: wait, add, second round, wait, ... complete
    a thread                                            b1: wait, add, second round, ...

The main thread starts each exchange, so that its first round is under way at once. A thread of its own does the rest:
buckets that are complete early are summed over all ranks before the backward pass ends. torch's operations and waits
release the interpreter's lock, so the passes are not slowed down.

One thread for all exchanges would wait for one at a time, in an order that depends on when each was started. With four
rounds, rank 0 then waits for round 4 of b0 before round 1 of b1, and rank 1 for round 2 of b1 before round 3 of b0:
both forever.
"""

import queue
import threading
from collections.abc import Callable

from samebits.cluster.world import World


def are_worth_threads(world: World) -> bool:
    """Return whether threads advance the exchanges of a world.

    Only with gloo, whose messages several threads may post: NCCL needs one order on all ranks. And only between
    machines: messages on one machine take less time than the threads' turns on the cores that compute.
    """
    return world.gloo_group is not None and world.num_hosts > 1


class ExchangeThreads:
    """The threads of one step, one for each exchange.

    New ones in each step, in 0.1 ms: nothing is left behind when a step is dropped. They start with the floating-point
    mode of the thread that starts them, so sums of tiny numbers have the same bits.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def put(self, advance: Callable[[], bool]) -> None:
        """Call an exchange's `advance` until it is complete."""
        # A daemon: at the end of the process it may wait for a rank that is lost.
        thread = threading.Thread(target=self._run, args=(advance,), name="exchange", daemon=True)
        self._threads.append(thread)
        thread.start()

    def finish(self) -> None:
        """Wait until all exchanges are complete.

        Raises:
            RuntimeError: Another rank is lost.
        """
        for _ in self._threads:
            # At the first error, since the others may wait for ranks that have left this step as well.
            if (error := self._ended.get()) is not None:
                raise error

    def join(self) -> None:
        """Wait until no thread uses a bucket, after `finish` or the end of the group."""
        for thread in self._threads:
            thread.join()

    def _run(self, advance: Callable[[], bool]) -> None:
        try:
            while not advance():
                pass
            self._ended.put(None)
        except BaseException as error:  # goes to the main thread
            self._ended.put(error)
