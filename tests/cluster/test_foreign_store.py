"""Processes that meet at the store of another program."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore


def test_a_store_of_another_program_is_recognized_before_a_rank_writes_to_it(visits: Callable[..., Any]) -> None:
    theirs = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    theirs.set("torch.rendezvous.x", "state")
    before = sorted(theirs.list_keys())
    text = visits(f"tcp://127.0.0.1:{theirs.port}", 1, 2, constants={"SERVED_S": 0.5}).error()
    assert f"the store at tcp://127.0.0.1:{theirs.port} does not belong to a run of Samebits" in text
    assert sorted(theirs.list_keys()) == before
