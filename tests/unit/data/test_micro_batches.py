"""The number of micro-batches that plans and reports print is that of the order."""

from __future__ import annotations

import pytest

from samebits.data.division import Alone, num_micro_batches
from samebits.data.order import Order


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 7, 16, 20])
@pytest.mark.parametrize("global_batch", [1, 6, 7, 16])
def test_each_step_has_the_fewest_micro_batches_that_hold_it(global_batch: int, micro_batch: int) -> None:
    for step in Order(33, global_batch, micro_batch).steps(Alone(), stop=40):
        count = num_micro_batches(step.num_samples, micro_batch)
        assert step.num_micro_batches == count == len(step.micro_batches)
        assert (count - 1) * micro_batch < step.num_samples <= count * micro_batch
