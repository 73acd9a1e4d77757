"""Functions that run in turn: one at a time, each until it waits for the others."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from samebits.parallel.coroutines import Coroutines


class Global:
    """Something that all functions set, each for itself."""

    def __init__(self) -> None:
        self.value: str | None = None

    def leave(self) -> Callable[[], None]:
        value, self.value = self.value, None
        return lambda: setattr(self, "value", value)


def turns() -> tuple[Coroutines, Global]:
    state = Global()
    return Coroutines(state.leave), state


def test_functions_change_over_where_they_wait_and_get_the_same_answer() -> None:
    run, state = turns()
    seen: list[str] = []

    def body(name: str) -> str:
        assert state.value is None
        state.value = name
        total = 0
        for number in range(3):
            seen.append(f"{name}{number}")
            total += run.wait(len(name) + number)
            assert state.value == name
        state.value = None
        return f"{name} {total}"

    settled: list[list[int]] = []

    def settle(values: list[int]) -> int:
        settled.append(values)
        return sum(values)

    names = ["a", "bb", "ccc"]
    assert run.run([lambda name=name: body(name) for name in names], settle) == ["a 27", "bb 27", "ccc 27"]
    assert settled == [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
    # The last one to wait continues, so each wait changes threads once less than there are functions.
    assert seen == ["a0", "bb0", "ccc0", "ccc1", "a1", "bb1", "bb2", "ccc2", "a2"]


def test_one_function_alone_runs_in_the_thread_that_asked() -> None:
    run, _ = turns()
    assert run.run([lambda: (run.wait(20), threading.current_thread())], lambda values: values[0] + 1) == [
        (21, threading.current_thread())
    ]


def test_no_two_functions_ever_run_at_once() -> None:
    run, _ = turns()
    busy = threading.Lock()

    def body() -> None:
        for _ in range(50):
            assert busy.acquire(blocking=False)
            sum(range(1000))
            busy.release()
            run.wait(1)

    run.run([body] * 4, sum)


def test_the_last_one_to_wait_combines_in_its_own_thread() -> None:
    run, _ = turns()
    threads: list[int] = []

    def body() -> int:
        run.wait(1)
        return threading.get_ident()

    results = run.run([body, body, body], lambda _: threads.append(threading.get_ident()))
    assert threads == [results[2]]
    assert len(set(results)) == 3


def test_an_interrupt_ends_all_where_they_wait_and_is_raised() -> None:
    run, _ = turns()
    unwound: list[int] = []

    def body(number: int) -> None:
        try:
            for turn in range(1000):
                run.wait(1)
                if (number, turn) == (1, 2):
                    signal.raise_signal(signal.SIGINT)
                time.sleep(0.001)  # the main thread handles the signal
        finally:
            unwound.append(number)

    with pytest.raises(KeyboardInterrupt):
        run.run([lambda number=number: body(number) for number in range(3)], sum)
    assert sorted(unwound) == [0, 1, 2]
    assert run.run([lambda: run.wait(1), lambda: run.wait(2)], sum) == [3, 3]


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_an_error_if_the_system_has_no_more_threads(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = turns()
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run.run([lambda: run.wait(1)] * 3, sum)
    assert run.run([lambda: run.wait(1)] * 3, sum) == [3, 3, 3]


def test_functions_that_end_at_different_waits() -> None:
    run, _ = turns()
    combined: list[list[Any]] = []

    def body(number: int) -> int:
        for _ in range(number):
            run.wait(number)
        return number

    assert run.run([lambda number=number: body(number) for number in (2, 0, 3, 1)], combined.append) == [2, 0, 3, 1]
    assert combined == [[2, None, 3, 1], [2, None, 3, None], [None, None, 3, None]]


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1])
def test_an_error_in_one_ends_the_others_where_they_wait_and_is_raised(fails: int, after: int) -> None:
    run, _ = turns()
    unwound: list[int] = []

    def body(number: int) -> None:
        try:
            for turn in range(3):
                if (number, turn) == (fails, after):
                    raise KeyError("broken")
                run.wait(1)
        except Exception:
            assert number == fails, "an abandoned function must not be able to go on by catching errors"
            raise
        finally:
            unwound.append(number)

    with pytest.raises(KeyError, match="broken"):
        run.run([lambda number=number: body(number) for number in range(3)], sum)
    # With no turn done, those behind the one that fails never began.
    assert set(unwound) == (set(range(3)) if after else set(range(fails + 1)))
    # And it can be used again.
    assert run.run([lambda: run.wait(1), lambda: run.wait(2)], sum) == [3, 3]


def test_one_that_catches_everything_and_waits_again_ends_too() -> None:
    run, _ = turns()

    def stubborn() -> None:
        try:
            run.wait(1)
        except BaseException:
            run.wait(2)

    def fails() -> None:
        run.wait(1)
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run.run([stubborn, fails], sum)
    assert run.run([lambda: run.wait(1), lambda: run.wait(2)], sum) == [3, 3]


def test_an_error_while_settling_ends_all() -> None:
    run, _ = turns()

    def settle(_: list[Any]) -> None:
        raise OverflowError("too much")

    with pytest.raises(OverflowError, match="too much"):
        run.run([lambda: run.wait(1)] * 3, settle)


def test_one_that_is_over_brings_nothing() -> None:
    run, _ = turns()
    settled: list[Any] = []
    run.run([lambda: None, lambda: run.wait(5)], settled.append)
    assert settled == [[None, 5]]
