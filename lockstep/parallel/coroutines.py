"""Several functions in one process, run strictly one at a time, each until it waits for the others.

Each has a thread of its own, as a pass through a network can't be left in the middle in any other way, but no two of
them ever compute at once. So what happens has one order, and what is global in the process (torch's generators, the
model's buffers) can be handed from one to the next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")
IDLE_S = 2.0  # after which a thread that has nothing to do ends


class _Threads:
    """Threads that wait for more to do: a new one has to build up torch's caches anew, which took 6 ms each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []

    def start(self, body: Callable[[], None], over: threading.Event) -> None:
        """Call `body` in a thread of its own, then set `over`."""

        def work() -> None:
            body()
            with self._lock:
                self._idle.append(inbox)
            over.set()

        with self._lock:
            if self._idle:
                inbox = self._idle.pop()
            else:
                inbox = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(inbox,), name="micro-batch", daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            try:
                inbox.get(timeout=IDLE_S)()
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:  # otherwise something is on its way
                        self._idle.remove(inbox)
                        return


class _Abandoned(BaseException):
    """Unwinds a function that waits for others of which one has failed."""


class _Turn(Generic[T]):
    """One function, and where it is."""

    def __init__(self, body: Callable[[], T], threads: _Threads) -> None:
        self._body, self._threads = body, threads
        self._go, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._is_abandoned = False
        self._has_begun, self._thread_is_free = False, threading.Event()
        self.waits_with: Any = None
        self.is_over = False
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.answer: Any = None

    def go_on(self) -> None:
        """Let it run until it waits or is over."""
        if not self._has_begun:
            self._has_begun = True
            self._threads.start(self._work, self._thread_is_free)
        self._go.release()
        self._rests.acquire()

    def wait(self, value: Any) -> Any:
        """From inside: rest until `go_on`, and return the answer."""
        self.waits_with = value
        self._rests.release()
        self._rest()
        return self.answer

    def abandon(self) -> None:
        """End it where it waits, or where it next does."""
        self._is_abandoned = True
        if self._has_begun:
            self._go.release()
            self._thread_is_free.wait()

    def _rest(self) -> None:
        if not self._is_abandoned:
            self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def _work(self) -> None:
        try:
            self._rest()
            self.results.append(self._body())
        except BaseException as error:
            self.error = error
        self.is_over, self.waits_with = True, None
        self._rests.release()


class Coroutines:
    """Runs functions in turn, so that they can wait for each other.

    Args:
        leave: Called when a function rests: takes what it has set in the process away, and returns it.
        come_back: Called with that before it goes on.
    """

    def __init__(self, leave: Callable[[], S], come_back: Callable[[S], None]) -> None:
        self._leave: Callable[[], Any] = leave
        self._come_back: Callable[[Any], None] = come_back
        self._threads = _Threads()
        self._now: _Turn[Any] | None = None
        self._settle: Callable[[list[Any]], Any] | None = None

    def run(self, bodies: Sequence[Callable[[], T]], settle: Callable[[list[Any]], Any]) -> list[T]:
        """Run functions until each has returned.

        An error in one of them ends all others where they wait, and is raised here.

        Args:
            bodies: Called in threads of their own, unless there is only one.
            settle: Called whenever each has come to `wait` or to its end, with what they wait with, in order, and None
                for those that are over. What it returns is what `wait` returns to all.

        Returns:
            What each returned.
        """
        self._settle = settle
        if len(bodies) == 1:
            return [bodies[0]()]
        turns = [_Turn(body, self._threads) for body in bodies]
        left: dict[_Turn[T], Any] = {}
        try:
            while True:
                for turn in turns:
                    if not turn.is_over:
                        self._go_on(turn, left)
                if all(turn.is_over for turn in turns):
                    return [turn.results[0] for turn in turns]
                answer = settle([turn.waits_with for turn in turns])
                for turn in turns:
                    turn.answer = answer
        finally:
            for turn in turns:
                turn.abandon()
            self._now = None

    def wait(self, value: Any) -> Any:
        """Called in one of the functions: wait for all the others.

        Args:
            value: For `settle`; not None.
        """
        if self._now is not None:
            return self._now.wait(value)
        assert self._settle is not None, "wait is called inside of run"
        return self._settle([value])

    def _go_on(self, turn: _Turn[Any], left: dict[_Turn[Any], Any]) -> None:
        self._now = turn
        if turn in left:
            self._come_back(left.pop(turn))
        turn.go_on()
        if turn.error is not None:
            raise turn.error
        if not turn.is_over:
            left[turn] = self._leave()
