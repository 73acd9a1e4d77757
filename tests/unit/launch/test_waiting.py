"""What a waiting launcher reports: what it waits for, for how long, and which launchers were refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from samebits.errors import LaunchError
from samebits.launch.nodes import rendezvous
from samebits.process_range import ProcessRange, RendezvousConfig


def wait(size: tuple[int, int], num_ready: int, why: rendezvous.Wait) -> str:
    nodes = RendezvousConfig(ProcessRange(*size), "a:29400", "run", 60.0, 5.0, 10.0, Path("runs/a"))
    return rendezvous.describe_wait(nodes, num_ready, "NAMES", why, 20.0)


def test_a_wait_for_too_few_nodes_names_the_time_until_it_gives_up() -> None:
    text = "waiting for 2 nodes at a:29400: 1 has joined (NAMES), 20 s\n  giving up in 0:40 (cluster.join_timeout_s)"
    assert wait((2, 2), 1, "first") == text


def test_a_world_with_enough_nodes_waits_for_more_and_does_not_give_up() -> None:
    text = wait((1, 2), 1, "first")
    assert text.startswith("1 of 1 to 2 nodes has joined at a:29400")
    assert "giving up" not in text
    assert "starting 5 s after the first 1 (cluster.last_call_s)" in text


@pytest.mark.parametrize(
    ("why", "size", "start"),
    [
        ("others", (1, 2), "waiting for the other nodes of the last world (NAMES), 20 s\n  lost after 10 s"),
        ("turn", (1, 2), "waiting until the run at a:29400 has saved and accepts this node (NAMES)"),
        ("turn", (1, 1), "the run at a:29400 has all of its 1 nodes (NAMES)"),
    ],
)
def test_a_node_outside_of_a_complete_world_reports_why_it_waits(
    why: rendezvous.Wait, size: tuple[int, int], start: str
) -> None:
    assert wait(size, 1, why).startswith(start)


def test_a_refused_launcher_is_named_to_those_that_wait(tmp_path: Path) -> None:
    store = HashStore()
    note = rendezvous.as_note(LaunchError("another run uses a:1", given="seed: 0 there, 7 here\nlr: 1 there, 2 here"))
    rendezvous.report_refusal(store, note)
    assert store.num_keys() == 0  # a store of another program
    store.set(rendezvous.OWNER, "{}")
    rendezvous.report_refusal(store, note)
    assert rendezvous.read_refusal(store).endswith(
        " was refused: another run uses a:1 (seed: 0 there, 7 here; lr: 1 there, 2 here)"
    )


def test_an_interrupted_launcher_leaves_no_note() -> None:
    assert rendezvous.as_note(KeyboardInterrupt()) == ""


@pytest.mark.parametrize("note", [b"\xff", b"[]", b"{}", 10**5 * b"[", b"1"])
def test_a_damaged_note_is_left_out(note: bytes) -> None:
    store = HashStore()
    store.set(rendezvous.REFUSED, note)  # type: ignore[arg-type]  # bytes are taken too
    assert rendezvous.read_refusal(store) == ""


def test_a_forged_note_cannot_write_to_the_terminal() -> None:
    store = HashStore()
    store.set(rendezvous.REFUSED, json.dumps({"host": "\x1b]0;owned\x07", "text": "a\nconfig error: b\u202e"}))
    text = rendezvous.read_refusal(store)
    assert text.isprintable()
    assert "\n" not in text
