"""Ranks with other code, data or processors are refused at the start, by name."""

from pathlib import Path

import pytest

from tests.ranks.fingerprint_in_ranks import begin, begin_counted, compared
from tests.ranks.rank_pool import RankPool


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("recipe", "code of recipe.py"),
        ("sample", "training sample 5"),
        ("all samples", "training sample "),
        ("processor", "CPU capability: SVE512 on rank 2"),
        ("MKL", "MKL_CBWR: COMPATIBLE on rank 2, none on rank 0"),
        ("model", "gradients of a trial micro-batch"),
    ],
)
def test_a_rank_that_differs_is_named_with_what_it_has(pool: RankPool, tmp_path: Path, fault: str, named: str) -> None:
    texts = pool.run(3, begin, tmp_path, fault)
    assert len(set(texts)) == 1
    assert "launch error: rank " in texts[0]
    assert "differs from rank 0 in" in texts[0]
    assert named in texts[0]


def test_ranks_on_several_kinds_of_processors_are_told_what_to_set(pool: RankPool, tmp_path: Path) -> None:
    text = pool.run(3, begin, tmp_path, "processor")[0]
    assert "set kernels=avx2 or kernels=portable, or mode=fast" in text


def test_ranks_with_the_same_begin_without_a_warning(pool: RankPool, tmp_path: Path) -> None:
    pool.run(3, begin, tmp_path, "MKL")  # a variable that was set meanwhile has no effect on later jobs
    assert pool.run(3, begin, tmp_path, "none") == [[]] * 3


def test_in_fast_mode_another_processor_is_reported_and_other_data_refused(pool: RankPool, tmp_path: Path) -> None:
    warnings = pool.run(2, begin, tmp_path, "processor", "fast")[0]
    assert [line.split(":")[0] for line in warnings] == ["CPU capability"]
    assert "training sample 5" in pool.run(2, begin, tmp_path, "sample", "fast")[0]


def test_only_ranks_that_differ_receive_the_values_of_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(3, begin_counted, tmp_path, "none") == [0] * 3
    assert min(pool.run(3, begin_counted, tmp_path, "sample")) > 0


@pytest.mark.parametrize(("size", "odd"), [(1, 0), (2, 0), (4, 3), (4, 9)])
def test_digests_show_on_every_rank_whether_values_are_equal(pool: RankPool, size: int, odd: int) -> None:
    has_odd = odd < size
    assert pool.run(size, compared, odd) == [(True, size == 1 or not has_odd, has_odd)] * size
