"""SyncBatchNorm over ranks on CPUs is batch norm over the whole batch, to rounding."""

import pytest

from tests.unit.ranks.in_ranks import run


@pytest.mark.parametrize("case", ["unequal", "cumulative", "empty"])
def test_statistics_and_gradients_are_those_of_the_whole_batch(case: str) -> None:
    for differences in run("batch_norm_cases.py", case):
        assert len(differences) == 7  # output, gradients of x, weight and bias; mean, variance, count
        assert max(differences) < 2e-5
