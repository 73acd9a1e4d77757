"""The gang of ranks, started once for all tests that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.gang import Gang


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    gang = Gang(4)
    yield gang
    gang.end()
