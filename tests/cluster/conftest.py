"""Processes that join worlds, for the tests: forked from a server that has imported torch once."""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import joiner
import pytest

from samebits.launch import forkserver
from tests.runs import LONG_S, own_port

Answer = tuple[str, Any, list[str]]


class Visit:
    """A process that joins a world."""

    def __init__(self, process: BaseProcess, answers: Connection) -> None:
        self.process, self.answers = process, answers

    def answer(self, timeout_s: float = LONG_S) -> Answer:
        assert self.answers.poll(timeout_s), "no answer"
        answer: Answer = self.answers.recv()
        self.process.join(timeout_s)
        return answer

    def error(self) -> str:
        kind, text, _ = self.answer()
        assert kind == "error", text
        return str(text)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Once for all tests: torch is imported one time."""
    forkserver.prepare(["samebits.cluster.world", "samebits.cluster.collectives"])


@pytest.fixture
def visits(fork_server: None) -> Iterator[Callable[..., Visit]]:
    """Starts a process that joins a world: visits(init, rank, world_size, **options)."""
    context = multiprocessing.get_context("forkserver")
    begun: list[Visit] = []

    def begin(
        *given: Any, environ: dict[str, str] | None = None, scenario: str = "", constants: Any = None, **options: Any
    ) -> Visit:
        ours, theirs = context.Pipe(duplex=False)
        # A waiting rank is reported after 5 s, which a busy machine may need to start two processes.
        args = (theirs, given, environ or {}, options, {"REPORT_EVERY_S": 60.0, **(constants or {})}, scenario)
        process = context.Process(target=joiner.visit, args=args)
        process.start()
        theirs.close()
        begun.append(Visit(process, ours))
        return begun[-1]

    yield begin
    for visit in begun:
        visit.process.join(0.1)
        if visit.process.is_alive():
            visit.process.kill()
            visit.process.join()
        visit.answers.close()
        visit.process.close()


@pytest.fixture
def init() -> str:
    """A port without a listener."""
    return f"tcp://127.0.0.1:{own_port()}"


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: that of a socket in it may not be long."""
    return tmp_path_factory.mktemp("t")
