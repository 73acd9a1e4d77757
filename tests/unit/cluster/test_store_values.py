"""Values in the store that are not there, or that no process of the run has written."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store, TCPStore

from samebits.cluster import rendezvous, signed
from samebits.cluster.env import RankAssignment
from samebits.cluster.rendezvous import RankInfo
from samebits.cluster.signed import Seal, SignedStore
from samebits.cluster.store import Generations
from samebits.launch.nodes import rendezvous as admission
from samebits.scratch import is_running
from samebits.watchdog import detector

HUGE = 10**400


def served(folder: Path) -> Store:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)


@pytest.mark.parametrize("make", [served, lambda folder: HashStore()])
def test_a_key_that_is_not_there_is_not_waited_for(make: Callable[[Path], Store], tmp_path: Path) -> None:
    raw = make(tmp_path)
    store = SignedStore(raw, Seal())
    start = time.monotonic()
    assert signed.peek(raw, "x") is None
    assert store.get("x") is None
    assert store.count("x") == 0
    store.put("x", [1])
    assert store.get("x") == [1]
    raw.delete_key("x")
    assert store.get("x") is None
    assert time.monotonic() - start < 60, "it waited for the store's timeout"


def test_numbers_that_are_too_large_are_refused() -> None:
    info = asdict(RankInfo(0, 2, "h", 7, "cpu", "auto", 0))
    assert rendezvous._rank_info(info) == RankInfo(**info)
    for name in ("rank", "pid", "world_size", "restart"):
        assert rendezvous._rank_info(info | {name: HUGE}) is None
        assert rendezvous._rank_info(info | {name: -1}) is None
    sign = {"doing": "", "waits": True, "step": 1, "stalled_s": 0.5, "beat": 0.5, "work_s": 0.5}
    sign |= {"num_steps": 1, "num_micro_batches": 1}
    assert signed.read_as(detector.Heartbeat, sign) is not None
    for number in (HUGE, float("nan"), float("inf"), True):
        assert signed.read_as(detector.Heartbeat, sign | {"stalled_s": number}) is None
    assert not is_running(HUGE)
    record = {"run": "r", "host": "h", "pid": 1, "user": "u", "folder": "f", "inode": float("inf"), "shared": {}}
    assert admission.read_record(json.dumps(record).encode()) is None


def test_slots_of_other_names_are_left_out_of_a_fault_in_the_store() -> None:
    error = signed.error_from_store({"what": "it failed", "slots": {"self": 1, "what": 2, "where": 3}})
    assert error.slots == {"where": "3"}


def test_a_damaged_count_of_arrivals_does_not_keep_rank_0_busy() -> None:
    raw = HashStore()
    raw.add("arrivals", 1 << 60)
    here = RankAssignment(0, 2, None, None, "tcp://h:1", "torchrun", agent_store=True)
    first = Generations(here, SignedStore(raw, Seal()), time.monotonic(), 5.0)
    assert first.find_generation() == 1
    other = RankAssignment(1, 2, None, None, "tcp://h:1", "torchrun", agent_store=True)
    generations = Generations(other, SignedStore(raw, Seal()), time.monotonic(), 5.0)
    first.announce()
    assert generations.find_generation() == 1
