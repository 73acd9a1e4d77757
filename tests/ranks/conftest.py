"""The pool of ranks, started once for all tests that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.end()
