"""Stacks of hanging processes: this one, its child processes, and a peer that cannot write its own."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from samebits.cluster import stacks
from samebits.cluster.stacks import StackDumper
from tests.runs import wait_until

pytestmark = pytest.mark.skipif(stacks.SIGNAL is None or not Path("/proc").exists(), reason="needs Linux")


def sleeps_for_ever() -> None:
    time.sleep(1000)


def never_gives_the_lock_back() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def be_stuck(mouth: Connection, how: Callable[[], None]) -> None:
    made = StackDumper()
    mouth.send(made.descriptor)
    how()


@pytest.fixture
def stuck() -> Iterator[Callable[[Callable[[], None]], tuple[int, int]]]:
    context = multiprocessing.get_context("fork")
    children = []

    def start(how: Callable[[], None]) -> tuple[int, int]:
        ear, mouth = context.Pipe()
        child = context.Process(target=be_stuck, args=(mouth, how), name="stuck")
        child.start()
        children.append(child)
        assert child.pid is not None
        return child.pid, ear.recv()

    yield start
    for child in children:
        child.kill()
        child.join()


def test_a_process_s_own_stacks_begin_with_its_main_thread_and_have_its_workers_(
    tmp_path: Path, stuck: Callable[[Callable[[], None]], tuple[int, int]]
) -> None:
    made = StackDumper()
    try:
        pid, _ = stuck(sleeps_for_ever)
        made.write(tmp_path / "logs" / "stacks.txt", "rank 0")
    finally:
        made.close()
    text = (tmp_path / "logs" / "stacks.txt").read_text()
    assert text.startswith("rank 0\n\n")
    assert "test_a_process_s_own_stacks" in text
    # A worker that is forked from it writes into the same file; this one has made its own.
    assert f"child process {pid}, stuck" in text


@pytest.mark.parametrize("how", [sleeps_for_ever, never_gives_the_lock_back])
def test_a_neighbor_s_stacks_are_had_though_it_is_stuck_in_native_code(
    tmp_path: Path, stuck: Callable[[Callable[[], None]], tuple[int, int]], how: Callable[[], None]
) -> None:
    pid, descriptor = stuck(how)
    file = tmp_path / "stacks.txt"
    # It has reported that it is about to hang; on a busy machine it may need longer to write than the limit.
    wait_until(lambda: stacks.write_for(pid, descriptor, file, "rank 1") and how.__name__ in file.read_text())
    os.kill(pid, 0)  # it is as it was


def test_a_stopped_process_is_known(tmp_path: Path, stuck: Callable[[Callable[[], None]], tuple[int, int]]) -> None:
    pid, descriptor = stuck(sleeps_for_ever)
    assert not stacks.is_stopped(pid)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: stacks.is_stopped(pid))
    assert not stacks.write_for(pid, descriptor, tmp_path / "stacks.txt", "rank 1")
    assert not (tmp_path / "stacks.txt").exists()


def test_a_process_that_would_die_of_the_signal_is_not_asked() -> None:
    child = multiprocessing.get_context("fork").Process(target=sleeps_for_ever)
    child.start()
    try:
        assert child.pid is not None
        assert not stacks.request_stacks(child.pid)
        time.sleep(0.1)
        assert child.is_alive()
        assert not stacks.request_stacks(2**22 - 3)  # no process
    finally:
        child.kill()
        child.join()
