"""The file in which the launcher names the members of a world, as a worker reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.cluster.epochs.membership import (
    LATE_S,
    Epoch,
    Membership,
    RunEnded,
    broken_mark,
    mark_path,
    write_epoch,
)


def membership(path: Path, worker: int, *epochs: Epoch) -> Membership:
    write_epoch(path, epochs[0])
    found = Membership(path, worker)
    found.present = epochs[0]
    write_epoch(path, epochs[-1])
    return found


def test_the_next_epoch_of_a_worker_is_one_that_names_it(tmp_path: Path) -> None:
    before, after = Epoch(0, 1, (0, 1)), Epoch(2, 3, (1, 4), urgent=2)
    assert membership(tmp_path / "epochs", 1, before, after).wait_for_next(60.0) == after
    with pytest.raises(TimeoutError):
        membership(tmp_path / "epochs", 0, before, after).wait_for_next(0.01)


def test_a_wait_for_others_ends_once_one_of_them_has_completed_the_run(tmp_path: Path) -> None:
    before, after = Epoch(0, 1, (0, 1)), Epoch(0, 1, (0, 1), is_last=True)
    found = membership(tmp_path / "epochs", 1, before, after)
    with pytest.raises(RunEnded):
        found.wait_for_next(60.0)
    assert found.has_ended(before)


def test_an_epoch_that_is_being_replaced_stays_the_newest_known(tmp_path: Path) -> None:
    found = membership(tmp_path / "epochs", 1, before := Epoch(0, 1, (0, 1)))
    (tmp_path / "epochs").write_text("{", encoding="utf-8")
    assert found.read() == before
    (tmp_path / "epochs").unlink()
    assert found.read() == before


@pytest.mark.parametrize(
    ("epoch", "is_reported"),
    [
        (Epoch(3, 1, (0, 1), urgent=3), True),
        (Epoch(3, 1, (0, 1), urgent=2), False),  # a new process joins: a member may have a validation to finish
        (Epoch(0, 1, (0, 1), urgent=0), False),  # the run starts, and its processes do not start at the same time
    ],
)
def test_members_that_are_late_after_a_loss_are_reported(tmp_path: Path, epoch: Epoch, is_reported: bool) -> None:
    found = membership(tmp_path / "epochs", 1, epoch)
    path = mark_path(tmp_path, broken_mark(epoch), 1)
    found.note_wait(epoch, LATE_S / 2)
    assert not path.exists()
    found.note_wait(epoch, LATE_S * 2)
    assert path.exists() == is_reported
