"""Where gloo's threads run after a world has started, and which connections messages take."""

import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import samebits
from samebits.cores import SCHED_SETATTR, TIME_SLICE_MS, core_ids, place_gloo_threads, set_time_slice, time_slice
from tests.ranks.placement_in_ranks import groups, placements, policies_with_batch_norm, slice_ns
from tests.runs import PYTHON_PATH

has_time_slices = pytest.mark.skipif(
    tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2]) < (6, 12)
    or platform.machine() not in SCHED_SETATTR,
    reason="needs Linux 6.12",
)
pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")


def test_gloo_takes_no_core_from_its_main_thread_and_stays_on_one_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    cores = sorted(core_ids())
    for rank, (policies, affinities, main, _) in enumerate(samebits.launch(placements, procs=2)):
        assert policies
        assert set(policies) == {os.SCHED_BATCH}
        assert affinities == [[cores[rank % len(cores)]]] * len(policies)
        assert main == cores  # DataLoader workers inherit it


@has_time_slices
def test_the_main_thread_of_a_rank_has_a_longer_time_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    assert [slice_ns for *_, slice_ns in samebits.launch(placements, procs=2)] == [TIME_SLICE_MS * 1e6] * 2


@has_time_slices
def test_a_time_slice_ends_with_its_block_and_is_inherited_by_threads() -> None:
    with ThreadPoolExecutor(1) as outer:  # a thread of its own: the slice of the test's thread does not change

        def inside_and_after() -> list[int]:
            with time_slice(7.0), ThreadPoolExecutor(1) as inner:
                found = [slice_ns(), inner.submit(slice_ns).result()]
            return [*found, slice_ns()]

        assert outer.submit(inside_and_after).result() == [7_000_000, 7_000_000, TIME_SLICE_MS * 1e6]


def test_another_policy_of_the_user_stays() -> None:
    with ThreadPoolExecutor(1) as other:

        def policy() -> int:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            set_time_slice(7.0)
            return os.sched_getscheduler(0)

        assert other.submit(policy).result() == os.SCHED_BATCH


@pytest.mark.full
def test_each_direction_between_two_ranks_has_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    upwards, downwards = set(), set()
    for names, timeouts in samebits.launch(groups, procs=3):
        assert len(timeouts) == 1
        for (source, destination), name in names:
            (upwards if source < destination else downwards).add(name)
    assert len(upwards) == len(downwards) == 1
    assert upwards != downwards


@pytest.mark.full
@pytest.mark.parametrize("procs", [2, 3])
def test_gloo_preempts_synchronized_batch_norm_if_cores_are_many(monkeypatch: pytest.MonkeyPatch, procs: int) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    expected = os.SCHED_OTHER if procs <= len(core_ids()) else os.SCHED_BATCH
    for policies in samebits.launch(policies_with_batch_norm, procs=procs):
        assert {*policies} == {expected}


def test_a_process_without_gloo_is_left_alone() -> None:
    assert place_gloo_threads(0) == []
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
