"""Threads of coroutines end at once: each test waits for the threads that it has started."""

import pytest

from samebits.parallel.coroutines import Coroutines


@pytest.fixture(autouse=True)
def _threads_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coroutines.__init__, "__defaults__", (0.02,))
