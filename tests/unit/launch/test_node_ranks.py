"""Node ranks that users assign to machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from torch.distributed import HashStore

from samebits.cluster.signed import Seal, SignedStore
from samebits.errors import LaunchError
from samebits.launch.nodes.rendezvous import claim, missing, release
from samebits.process_range import ProcessRange, RendezvousConfig


def a_store() -> SignedStore:
    return SignedStore(HashStore(), Seal("a secret of the test", "run"))


def nodes(size: int, rank: int | None = 0) -> RendezvousConfig:
    return RendezvousConfig(ProcessRange(size, size), "127.0.0.1:1", "run", 10.0, 1.0, 10.0, Path("runs/a"), rank=rank)


def test_unclaimed_ranks_are_known() -> None:
    store = a_store()
    claim(store, 1, 3)
    assert missing(store, nodes(3)) == "missing node ranks 0 2"
    assert missing(store, nodes(3, None)) == ""
    claim(store, 0, 3)
    release(store, 1)
    assert missing(store, nodes(3)) == "missing node ranks 1 2"


def test_a_rank_that_another_machine_has_is_refused_with_both_names() -> None:
    store = a_store()
    store.put("node/1", ["elsewhere", 77])
    with pytest.raises(LaunchError, match="two machines have node rank 1") as caught:
        claim(store, 1, 2)
    assert f"elsewhere pid 77\n{socket.gethostname()} pid {os.getpid()}" in caught.value.slots["where"]


def test_a_rank_whose_launcher_on_this_machine_has_died_is_taken_over() -> None:
    store = a_store()
    store.put("node/0", [socket.gethostname(), 2**22 + 1])  # above the largest process id
    claim(store, 0, 2)
    assert store.get("node/0") == [socket.gethostname(), os.getpid()]


def test_different_numbers_of_machines_are_refused() -> None:
    store = a_store()
    claim(store, 0, 2)
    with pytest.raises(LaunchError, match="node rank 1 was started with --nodes 3, another with --nodes 2"):
        claim(store, 1, 3)


def test_a_forged_claim_does_not_count() -> None:
    for forged in ("x", '["elsewhere", 77]', '- ["elsewhere", 77]', "- 5"):
        store = a_store()
        store.store.set("node/0", forged)
        store.store.set("num_nodes", forged)
        assert missing(store, nodes(2)) == "missing node ranks 0 1"
        claim(store, 0, 2)
        assert store.get("node/0") == [socket.gethostname(), os.getpid()]
