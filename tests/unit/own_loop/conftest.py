from collections.abc import Iterator

import pytest

from samebits.own_loop import ending
from samebits.own_loop.habits import RepeatCheck
from tests.unit.own_loop.loops import Loop, torch_settings


@pytest.fixture(autouse=True)
def _torch_settings() -> Iterator[None]:
    with torch_settings():
        yield
    # Loops that a test has left inside a step would end the whole test run with an error.
    ending._FAULTS.clear()
    ending._LOADERS.clear()


@pytest.fixture
def usual() -> str:
    """The weights after two epochs of the usual loop."""
    loop = Loop()
    loop.epoch()
    loop.epoch()
    return loop.sha256()


@pytest.fixture
def no_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the micro-batches of a step only, for tests that count them."""
    monkeypatch.setattr(RepeatCheck, "num_bodies", lambda self, step, **_: len(step.micro_batches))
    monkeypatch.setattr(RepeatCheck, "note", lambda *_, **__: None)
