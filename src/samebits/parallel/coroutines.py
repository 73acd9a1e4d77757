"""Threads used as coroutines: several functions in one process, exactly one of which computes at any time.

Synchronized batch norm needs every micro-batch of a step to stop in the middle of its forward and backward pass.
Python's generators cannot do this: `yield` would have to pass through torch's autograd engine, which is C++. So each
function has a thread of its own, and locks pass control from one thread to the next. There is no parallelism, so
the order of events is fixed, and process-wide state (torch's generators, the model's buffers) is switched at each
change. Three functions a, b, c that wait twice:

    a   run wait()                                           run wait()                        return
    b              run wait()                                           run wait() combine() return
    c                         run wait() combine() run wait()                                         return

The last one to wait calls `combine` and continues: with two functions there is one change of threads for each wait, and
the function that continues finds its data in the cache.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from samebits.portable.arithmetic import in_this_arithmetic

T = TypeVar("T")
IDLE_S = 2.0  # after which an idle thread ends


class _ThreadPool:
    """Threads kept for the next step: a new thread fills torch's per-thread caches again, measured 6 ms each."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def start(self, body: Callable[[], None], done: threading.Event) -> None:
        """Call `body` in an idle or new thread, then set `done`."""

        body = in_this_arithmetic(body)

        def work() -> None:
            body()
            # Idle before done: after `done` the caller may start the next body, which should find this thread.
            with self._lock:
                self._idle.append(inbox)
            done.set()

        with self._lock:
            if self._idle:
                inbox = self._idle.pop()
            else:
                inbox = queue.SimpleQueue[Callable[[], None] | None]()
                # A daemon: an idle or blocked thread must not delay the end of the process.
                threading.Thread(
                    target=self._serve, args=(inbox,), name="micro-batch", daemon=True
                ).start()
        inbox.put(work)

    def close(self) -> None:
        """End the idle threads now."""
        with self._lock:
            for inbox in self._idle:
                inbox.put(None)
            self._idle = []

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while True:
            try:
                work = inbox.get(timeout=self._idle_s)
                if work is None:
                    return
                work()
            except queue.Empty:
                with self._lock:
                    # `start` may have taken this inbox between the timeout and the lock: then work is on its way.
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return


class _Abandoned(BaseException):
    """Unwinds a waiting function after another one failed. Not an Exception, so that `except Exception` lets it by."""


class _Coroutine(Generic[T]):
    """One function and its state.

    Attributes:
        value: What the function waits with; None while it runs and once it has returned.
        answer: What its `wait` returns when it resumes.
        state: Restores the process-wide state with which it resumes, in a list of one.
        is_started: Whether it has a thread.
        has_arrived: Whether it waits for the others, or is done.
        is_done: Whether it has returned or raised.
        results: Its return value, in a list of one once it has returned.
        error: What it raised.
        resumed: Released to resume it. A semaphore would do the same in several times the time.
        is_thread_free: Whether its thread is idle again.
    """

    def __init__(self, body: Callable[[], T]) -> None:
        self.body = body
        self.value: Any = None
        self.answer: Any = None
        self.state: list[Callable[[], None]] = []
        self.is_started = self.has_arrived = self.is_done = False
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.resumed = threading.Lock()
        self.is_thread_free = threading.Event()
        # Locked from the start: the first `acquire` waits for control, and does not take it.
        self.resumed.acquire()


class Coroutines:
    """Runs functions by turns, so that they can wait for each other inside any call.

    Args:
        save: Called when a function starts to wait: resets the process, and returns what restores its process-wide
            state.
    """

    def __init__(self, save: Callable[[], Callable[[], None]], idle_s: float = IDLE_S) -> None:
        self._save = save
        self._threads = _ThreadPool(idle_s)
        self._all: list[_Coroutine[Any]] = []
        self._current: _Coroutine[Any] | None = None
        self._combine: Callable[[list[Any]], Any] | None = None
        # Whether control is back at `run`: all functions have returned, one has failed, or one has been unwound.
        # A flag and a lock, not an event: an interrupt inside of `Event.wait` can leave the event's own lock locked.
        self._is_over = False
        self._over = threading.Lock()
        self._is_unwinding = False

    def run(
        self, bodies: Sequence[Callable[[], T]], combine: Callable[[list[Any]], Any]
    ) -> list[T]:
        """Run functions until each has returned.

        An error in one function unwinds all others where they wait, and is raised here.

        Args:
            bodies: The functions. A single one runs in the calling thread, several in threads of their own.
            combine: Called when every function waits or has returned, with their values in order (None for a
                function that has returned), by the last one. Its result is what `wait` returns in all of them.

        Returns:
            The result of each function, in order.
        """
        self._combine = combine
        self._current = None
        # One micro-batch in this process: without a thread, `wait` calls `combine` itself (ADR 7).
        if len(bodies) == 1:
            return [bodies[0]()]
        coroutines = self._all = [_Coroutine(body) for body in bodies]
        self._is_over = self._is_unwinding = False
        try:
            self._resume(coroutines[0])
            self._wait_until_over()
            for coroutine in coroutines:
                if coroutine.error is not None:
                    raise coroutine.error
            return [coroutine.results[0] for coroutine in coroutines]
        finally:
            self._unwind()
            self._all = []
            self._current = None

    def close(self) -> None:
        """End the threads. Another `run` starts new ones."""
        self._threads.close()

    def wait(self, value: Any) -> Any:
        """Wait for all other functions, inside one; return the result of `combine`, which gets `value`, not None."""
        assert self._combine is not None, "wait is called inside of run"
        me = self._current
        if me is None:
            return self._combine([value])
        if self._is_unwinding:
            raise _Abandoned
        me.value = value
        me.has_arrived = True
        following = self._following(me)
        if following is not me:
            # Before control passes on, since the next function changes this state.
            me.state = [self._save()]
            self._resume(following)
            me.resumed.acquire()
            if self._is_unwinding:
                raise _Abandoned
        return me.answer

    def _following(self, last: _Coroutine[Any]) -> _Coroutine[Any]:
        """Return the next function, after `last` has arrived. The last one to arrive combines, and continues itself."""
        place = self._all.index(last)
        in_turn = self._all[place:] + self._all[:place]
        missing = next((each for each in in_turn if not each.has_arrived), None)
        if missing is not None:
            return missing
        assert self._combine is not None
        answer = self._combine([each.value for each in self._all])
        for each in self._all:
            each.answer = answer
            each.has_arrived = each.is_done
        return next(each for each in in_turn if not each.is_done)

    def _resume(self, coroutine: _Coroutine[Any]) -> None:
        self._current = coroutine
        if coroutine.state:
            coroutine.state.pop()()
        if coroutine.is_started:
            coroutine.resumed.release()
        else:
            try:
                coroutine.is_started = True  # before the thread can look at it
                self._threads.start(lambda: self._serve(coroutine), coroutine.is_thread_free)
            except BaseException:  # the system has no more threads, or an interrupt of `run`
                coroutine.is_started = False
                raise

    def _serve(self, coroutine: _Coroutine[Any]) -> None:
        """Run a function in its thread, and pass control on."""
        try:
            coroutine.results.append(coroutine.body())
            # A function that has returned leaves nothing to restore.
            coroutine.value = None
            coroutine.has_arrived = True
            coroutine.is_done = True
            if not (self._is_unwinding or all(each.is_done for each in self._all)):
                self._resume(self._following(coroutine))
                return
        except BaseException as error:
            # Even SystemExit: if control did not return to `run`, it would wait forever.
            coroutine.error = error
            coroutine.is_done = True
        if (
            coroutine in self._all
        ):  # else an interrupt of `run` came while it started this thread, and `run` has ended
            self._is_over = True
            # An interrupt may have released it before, and a second release is an error.
            if self._over.locked():
                self._over.release()

    def _wait_until_over(self) -> None:
        while not self._is_over:
            self._over.acquire()

    def _unwind(self) -> None:
        """End what still waits, after an error, and return when each thread is idle: the next step starts none."""
        self._is_unwinding = True
        if self._all[0].is_started:  # else the system has no thread for it
            self._wait_until_over()  # after an interrupt of `run` itself a function still runs, up to where it waits
        for coroutine in self._all:
            if coroutine.is_started and not coroutine.is_done:
                self._is_over = False
                coroutine.resumed.release()
                self._wait_until_over()
        for coroutine in self._all:
            if coroutine.is_started:
                coroutine.is_thread_free.wait()
