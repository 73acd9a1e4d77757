"""A process that starts scripts, for the tests of a file."""

from collections.abc import Iterator

import pytest

from tests import guards
from tests.foreign.scripts import Starter


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with Starter() as starter:
        guards.KEPT.add(starter.pid)
        yield starter
    guards.KEPT.discard(starter.pid)
