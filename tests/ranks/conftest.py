"""The pool of ranks, started once for all tests that use it."""

from collections.abc import Iterator

import pytest

from tests.ranks.rank_pool import RankPool, new_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with new_pool(4) as pool:
        yield pool
