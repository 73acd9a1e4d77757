"""Learning rates against values worked out by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.config.schema import OptimConfig
from samebits.optim.schedule import factor


def factors(num_steps: int, steps_per_epoch: int, **config: Any) -> list[float]:
    settings = OptimConfig(**config)
    return [factor(step, num_steps, steps_per_epoch, settings) for step in range(num_steps)]


def test_constant_stays() -> None:
    assert factors(5, 2) == [1.0] * 5


def test_cosine_starts_at_the_peak_passes_the_middle_and_ends_at_its_final_factor() -> None:
    got = factors(5, 1, schedule="cosine", final_factor=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    assert got == pytest.approx([1.0, quarter, 0.6, 1.2 - quarter, 0.2])


def test_one_cycle_rises_to_its_peak_and_falls_to_its_end() -> None:
    got = factors(11, 1, schedule="one_cycle", peak_at=0.4, start_factor=0.1, final_factor=0.01)
    assert got[0] == pytest.approx(0.1)
    assert got[2] == pytest.approx(0.55)  # half way up
    assert got[4] == pytest.approx(1.0)
    assert got[7] == pytest.approx(0.505)  # half way down
    assert got[10] == pytest.approx(0.01)
    assert got[:5] == sorted(got[:5])
    assert got[4:] == sorted(got[4:], reverse=True)


@pytest.mark.parametrize(("peak_at", "ends"), [(0.0, (1.0, 0.0)), (1.0, (0.04, 1.0))])
def test_one_cycle_may_peak_at_an_end(peak_at: float, ends: tuple[float, float]) -> None:
    got = factors(10, 1, schedule="one_cycle", peak_at=peak_at)
    assert (got[0], got[-1]) == pytest.approx(ends)


def test_multi_step_multiplies_at_each_milestone_in_epochs() -> None:
    got = factors(8, 2, schedule="multi_step", milestones=(1, 2.5), gamma=0.1)
    assert got == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_warmup_is_linear_and_the_schedule_then_continues_as_without_it() -> None:
    with_warmup = factors(12, 4, schedule="cosine", warmup_epochs=1)
    without = factors(12, 4, schedule="cosine")
    assert with_warmup[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert with_warmup[4:] == without[4:]


def test_warmup_may_end_inside_an_epoch() -> None:
    assert factors(4, 4, warmup_epochs=0.4) == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_a_run_of_one_step_has_a_learning_rate() -> None:
    assert factors(1, 1, schedule="cosine") == [1.0]
    assert factors(1, 1, schedule="one_cycle", start_factor=0.25) == [0.25]


@settings(max_examples=400, deadline=None)
@given(
    num_steps=st.integers(1, 500),
    steps_per_epoch=st.integers(1, 50),
    schedule=st.sampled_from(["constant", "cosine", "one_cycle", "multi_step"]),
    warmup=st.floats(0, 5),
    final=st.floats(0, 1),
    peak=st.floats(0, 1),
    start=st.floats(0, 1),
)
def test_factors_are_between_nothing_and_the_peak(
    num_steps: int, steps_per_epoch: int, schedule: Any, warmup: float, final: float, peak: float, start: float
) -> None:
    config = OptimConfig(
        schedule=schedule, warmup_epochs=warmup, final_factor=final, peak_at=peak, start_factor=start, milestones=(1, 3)
    )
    for step in range(num_steps):
        assert 0 <= factor(step, num_steps, steps_per_epoch, config) <= 1 + 1e-12


def test_warmup_cosine_is_torchvisions_schedule_at_each_epoch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    # As in torchvision's references/classification/train.py, stepped after each epoch.
    reference = torch.optim.lr_scheduler.SequentialLR(
        sgd,
        [
            torch.optim.lr_scheduler.LinearLR(sgd, start_factor=0.01, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=25, eta_min=0.001),
        ],
        milestones=[5],
    )
    expected = []
    for _ in range(30):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        reference.step()
    got = factors(30_000, 1000, schedule="warmup_cosine", warmup_epochs=5, warmup_factor=0.01, final_factor=0.001)
    assert got[::1000] == pytest.approx(expected, abs=1e-4)
    assert got[-1] == pytest.approx(0.001)
    assert len(set(got[:5000])) == 5000  # changes at each step, not at each epoch


def test_a_warmup_factor_is_where_the_warmup_starts() -> None:
    got = factors(10, 2, warmup_epochs=2, warmup_factor=0.2)
    assert got[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@settings(max_examples=200, deadline=None)
@given(num_steps=st.integers(2, 300), steps_per_epoch=st.integers(1, 60), warmup=st.floats(0, 20))
def test_warmup_takes_at_most_half_of_a_run_or_what_is_set(num_steps: int, steps_per_epoch: int, warmup: float) -> None:
    shape = {"schedule": "cosine", "final_factor": 0.1}
    got, without = factors(num_steps, steps_per_epoch, warmup_epochs=warmup, **shape), factors(num_steps, 1, **shape)
    length = math.ceil(min(warmup * steps_per_epoch, num_steps / 2))
    assert got[length:] == without[length:]
    assert got[:length] == pytest.approx([(step + 1) / (length + 1) for step in range(length)])
    assert length <= (num_steps + 1) // 2


def test_a_run_that_would_be_all_warmup_ends_at_a_low_learning_rate() -> None:
    got = factors(20, 10, schedule="cosine", warmup_epochs=2)  # the preset of classify with epochs=2
    assert got[9] == max(got)
    assert got[9] == pytest.approx(10 / 11)
    assert got[-1] == 0
