"""The crew of one of several machines, with real processes that train nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from samebits.cluster.views.membership import mark_path
from samebits.launch.crew.crew import Entry
from samebits.launch.crew.recovering_crew import RecoveringCrew
from samebits.launch.supervisor import Supervisor
from samebits.process_range import ProcessRange, RendezvousConfig
from tests.unit.launch.meeting import Meeting, a_store


def train_nothing(folder: Path, number: int) -> int:
    """Make the marks of a process that completes its run, once there is a file called end."""
    for name in ("ready", "member"):
        mark_path(folder, name, number).touch()
    end = time.monotonic() + 60.0
    while not (folder / "end").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return 0


def test_a_process_that_is_done_between_two_looks_at_it_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = RecoveringCrew._publish

    def publish_late(crew: RecoveringCrew) -> None:
        for member in crew._processes.values():
            if member.has_marked("member"):
                (tmp_path / "end").touch()
                member.process.join(60.0)  # it was running when the crew looked at it a moment ago
        publish(crew)

    monkeypatch.setattr(RecoveringCrew, "_publish", publish_late)
    store = a_store()
    entry = Entry(train_nothing, (tmp_path, 0), tmp_path, 0.0, "")
    nodes = RendezvousConfig(ProcessRange(1, 1), "127.0.0.1:29500", "run", 60.0, 0.0, 10.0, tmp_path)
    crew = RecoveringCrew(
        entry, Supervisor(tmp_path, 10.0, None, lambda: "stopping"), num_procs=1, min_procs=1, max_restarts=0,
        rendezvous=Meeting(nodes, store),
    )  # fmt: skip
    has_failed, results = crew.run()
    crew.end(int(has_failed), "")
    assert not has_failed
    assert [result.code for result in results.values()] == [0]
