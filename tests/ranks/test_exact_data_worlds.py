"""Ranks of an exact loop with other data are refused before the first step, with what differs."""

from pathlib import Path

import pytest

from tests.ranks.exact_data_in_ranks import compare
from tests.ranks.rank_pool import RankPool


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("count", "number of samples\n  given  rank 0: 12, rank 1: 11"),
        ("file", "sizes of its files"),
        ("split", "sample "),
    ],
)
def test_ranks_with_other_data_are_told_what_differs(pool: RankPool, tmp_path: Path, fault: str, text: str) -> None:
    texts = pool.run(2, compare, tmp_path, fault, 0)
    assert len(set(texts)) == 1
    assert f"the ranks have different data: {text}" in texts[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_with_the_same_data_begin(pool: RankPool, tmp_path: Path, num_workers: int) -> None:
    assert pool.run(3, compare, tmp_path, "none", num_workers) == ["", "", ""]
