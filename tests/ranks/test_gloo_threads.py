"""Where gloo's threads run after a world has started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import lockstep
from lockstep.cores import core_ids, place_gloo_threads
from tests.ranks.placement_in_ranks import placements

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")


def test_gloo_takes_no_core_from_its_main_thread_and_stays_on_one_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cores = sorted(core_ids())
    for rank, (policies, affinities, main) in enumerate(lockstep.launch(placements, procs=2)):
        assert policies
        assert set(policies) == {os.SCHED_BATCH}
        assert affinities == [[cores[rank % len(cores)]]] * len(policies)
        assert main == cores  # DataLoader workers inherit it


def test_a_process_without_gloo_is_left_alone() -> None:
    assert place_gloo_threads(0) == []
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
