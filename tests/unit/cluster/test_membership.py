"""The file in which the launcher names the members of a world, as a worker reads it."""

from pathlib import Path

import pytest

from samebits.cluster.views.membership import LATE_S, Membership, RunEnded, View, broken_mark, mark_path, write_view


def membership(path: Path, worker: int, *views: View) -> Membership:
    write_view(path, views[0])
    found = Membership(path, worker)
    found.present = views[0]
    write_view(path, views[-1])
    return found


def test_the_next_view_of_a_worker_is_one_that_names_it(tmp_path: Path) -> None:
    before, after = View(0, 1, (0, 1)), View(2, 3, (1, 4), urgent=2)
    assert membership(tmp_path / "views", 1, before, after).wait_for_next(60.0) == after
    with pytest.raises(TimeoutError):
        membership(tmp_path / "views", 0, before, after).wait_for_next(0.01)


def test_a_wait_for_others_ends_once_one_of_them_has_completed_the_run(tmp_path: Path) -> None:
    before, after = View(0, 1, (0, 1)), View(0, 1, (0, 1), is_last=True)
    found = membership(tmp_path / "views", 1, before, after)
    with pytest.raises(RunEnded):
        found.wait_for_next(60.0)
    assert found.has_ended(before)


def test_a_view_that_is_being_replaced_stays_the_newest_known(tmp_path: Path) -> None:
    found = membership(tmp_path / "views", 1, before := View(0, 1, (0, 1)))
    (tmp_path / "views").write_text("{", encoding="utf-8")
    assert found.read() == before
    (tmp_path / "views").unlink()
    assert found.read() == before


@pytest.mark.parametrize(
    ("view", "is_reported"),
    [
        (View(3, 1, (0, 1), urgent=3), True),
        (View(3, 1, (0, 1), urgent=2), False),  # a new process joins: a member may have a validation to finish
        (View(0, 1, (0, 1), urgent=0), False),  # the run starts, and its processes do not start at the same time
    ],
)
def test_members_that_are_late_after_a_loss_are_reported(tmp_path: Path, view: View, is_reported: bool) -> None:
    found = membership(tmp_path / "views", 1, view)
    path = mark_path(tmp_path, broken_mark(view), 1)
    found.note_wait(view, LATE_S / 2)
    assert not path.exists()
    found.note_wait(view, LATE_S * 2)
    assert path.exists() == is_reported
