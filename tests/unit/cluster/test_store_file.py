"""A file as the store."""

import os
import struct
from pathlib import Path

import pytest

from samebits.cluster.env import RankAssignment
from samebits.cluster.store import open_store
from samebits.errors import LaunchError


def open_at(path: Path) -> None:
    open_store(RankAssignment(0, 1, None, None, f"file://{path}", "command line"), 5.0, print)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_is_made_or_taken(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "store"
    if is_there:
        path.touch()
    open_at(path)
    assert path.is_file()


def test_a_file_that_cannot_be_created_is_reported_at_once(tmp_path: Path) -> None:
    # Root may write to /proc by its permissions, but nothing can be made there.
    for path in (Path("/proc/x"), tmp_path):
        with pytest.raises(LaunchError, match=f"{path} can't be written: "):
            open_at(path)


def test_a_file_of_another_kind_is_neither_written_to_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("mine")
    with pytest.raises(LaunchError, match="was not created by a run"):
        open_at(path)
    assert path.read_text() == "mine"


def test_a_store_file_of_other_ranks_is_accepted(tmp_path: Path) -> None:
    open_at(tmp_path / "store")
    assert (tmp_path / "store").stat().st_size
    open_at(tmp_path / "store")


def length(number: int) -> bytes:
    return struct.pack("@I", number)


OTHER_KEY = length(6) + b"/other" + length(1) + b"1"


@pytest.mark.parametrize("tail", [OTHER_KEY, b"x", length(1 << 30) + b"x", length(5) + b"/lock", bytes(1000)])
def test_a_store_that_is_damaged_or_another_program_s_is_left_alone(tmp_path: Path, tail: bytes) -> None:
    open_at(tmp_path / "store")
    content = (tmp_path / "store").read_bytes() + tail
    (tmp_path / "theirs").write_bytes(content)
    with pytest.raises(LaunchError, match="was not created by a run"):
        open_at(tmp_path / "theirs")
    assert (tmp_path / "theirs").read_bytes() == content


def test_a_pipe_is_no_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store")
    with pytest.raises(LaunchError, match="was not created by a run"):
        open_at(tmp_path / "store")
