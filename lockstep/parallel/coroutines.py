"""Threads used as coroutines: several functions in one process, exactly one of which computes at any time.

Synchronized batch norm needs every micro-batch of a step to stop in the middle of its forward and backward pass.
Python's generators cannot do this: `yield` would have to pass through torch's autograd engine, which is C++. So each
function has a thread of its own, and locks pass control from one thread to the next. There is no parallelism, so
the order of events is fixed, and process-wide state (torch's generators, the model's buffers) is switched at each
change. Three functions a, b, c that wait once:

    main thread    run a        run b        run c        combine(values)  run a        run b        run c
    a              ..... wait()                                            ..... return
    b                           ..... wait()                                            ..... return
    c                                        ..... wait()                                            ..... return
    save/restore         save a       save b       save c      restore a         restore b      restore c
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")
IDLE_S = 2.0  # after which an idle thread ends


class _ThreadPool:
    """Threads kept for the next step: a new thread fills torch's per-thread caches again, measured 6 ms each."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def start(self, body: Callable[[], None], done: threading.Event) -> None:
        """Call `body` in an idle or new thread, then set `done`."""

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
                threading.Thread(target=self._serve, args=(inbox,), name="micro-batch", daemon=True).start()
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
        is_done: Whether it has returned or raised.
        results: Its return value, in a list of one once it has returned.
        error: What it raised.
    """

    def __init__(self, body: Callable[[], T], threads: _ThreadPool) -> None:
        self._body, self._threads = body, threads
        # Control is passed by two locks, which are locked but at the moment of passing: the main thread releases
        # `_resumed` and acquires `_paused`. A semaphore does the same in several times the time.
        self._resumed, self._paused = threading.Lock(), threading.Lock()
        self._resumed.acquire()
        self._paused.acquire()
        self._is_abandoned = False
        self._is_started, self._is_thread_free = False, threading.Event()
        self.value: Any = None
        self.is_done = False
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.answer: Any = None

    def resume(self) -> None:
        """Run the function until it waits or ends. Called by the main thread."""
        if not self._is_started:
            self._is_started = True
            self._threads.start(self._run, self._is_thread_free)
        self._resumed.release()
        self._paused.acquire()

    def wait(self, value: Any) -> Any:
        """Pause the function until `resume`, and return the answer. Called by the function's own thread."""
        if self._is_abandoned:  # the main thread waits for the end of this one
            raise _Abandoned
        self.value = value
        self._paused.release()
        self._pause()
        return self.answer

    def abandon(self) -> None:
        """Unwind the function where it waits, or at its next wait, and return when its thread is free."""
        self._is_abandoned = True
        if self._is_started:
            self._resumed.release()
            self._is_thread_free.wait()

    def _pause(self) -> None:
        self._resumed.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def _run(self) -> None:
        try:
            self._pause()
            self.results.append(self._body())
        except BaseException as error:
            # Even SystemExit: if control did not return to the main thread, it would wait for ever.
            self.error = error
        self.is_done, self.value = True, None
        if not self._is_abandoned:  # else no thread waits for it
            self._paused.release()


class Coroutines:
    """Runs functions by turns, so that they can wait for each other inside any call.

    Args:
        save: Called when a function starts to wait: returns its process-wide state, and resets the process.
        restore: Called with that state before the function resumes.
        idle_s: How long a thread waits for the next `run`, seconds.
    """

    def __init__(self, save: Callable[[], S], restore: Callable[[S], None], idle_s: float = IDLE_S) -> None:
        self._save: Callable[[], Any] = save
        self._restore: Callable[[Any], None] = restore
        self._threads = _ThreadPool(idle_s)
        self._current: _Coroutine[Any] | None = None
        self._combine: Callable[[list[Any]], Any] | None = None

    def run(self, bodies: Sequence[Callable[[], T]], combine: Callable[[list[Any]], Any]) -> list[T]:
        """Run functions until each has returned.

        An error in one function unwinds all others where they wait, and is raised here.

        Args:
            bodies: The functions. A single one runs in the calling thread, several in threads of their own.
            combine: Called when every function waits or has returned, with their values in order (None for a
                function that has returned). Its result is what `wait` returns in all of them.

        Returns:
            The result of each function, in order.
        """
        self._combine = combine
        # One micro-batch in this process: without a thread, `wait` calls `combine` itself (ADR 7).
        if len(bodies) == 1:
            return [bodies[0]()]
        coroutines = [_Coroutine(body, self._threads) for body in bodies]
        saved: dict[_Coroutine[T], Any] = {}
        try:
            while True:
                for coroutine in coroutines:
                    if not coroutine.is_done:
                        self._resume(coroutine, saved)
                if all(coroutine.is_done for coroutine in coroutines):
                    return [coroutine.results[0] for coroutine in coroutines]
                answer = combine([coroutine.value for coroutine in coroutines])
                for coroutine in coroutines:
                    coroutine.answer = answer
        finally:
            # Also after success: this waits until each thread is idle, so that the next step starts no new one.
            for coroutine in coroutines:
                coroutine.abandon()
            self._current = None

    def close(self) -> None:
        """End the threads. Another `run` starts new ones."""
        self._threads.close()

    def wait(self, value: Any) -> Any:
        """Wait for all other functions. Called inside one of them.

        Args:
            value: For `combine`; not None.

        Returns:
            The result of `combine`.
        """
        if self._current is not None:
            return self._current.wait(value)
        assert self._combine is not None, "wait is called inside of run"
        return self._combine([value])

    def _resume(self, coroutine: _Coroutine[Any], saved: dict[_Coroutine[Any], Any]) -> None:
        self._current = coroutine
        if coroutine in saved:
            self._restore(saved.pop(coroutine))
        coroutine.resume()
        if coroutine.error is not None:
            raise coroutine.error
        # A function that has returned leaves nothing to restore.
        if not coroutine.is_done:
            saved[coroutine] = self._save()
