"""Flags survive the sum over ranks as a float32, alone or together."""

from __future__ import annotations

import math

import pytest
import torch

from samebits.engine.progress import StepFlags


@pytest.mark.parametrize("number", range(16))
def test_what_rank_0_packs_every_rank_unpacks(number: int) -> None:
    flags = StepFlags(number)
    summed = torch.tensor([float(flags), 0.0, 0.0], dtype=torch.float32).sum().item()
    assert StepFlags.unpack(summed) == flags


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_a_sum_that_is_not_finite_has_no_flags(value: float) -> None:
    assert StepFlags.unpack(value) == StepFlags(0)
