"""Which folders in a run folder are joined as those of launchers that train there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from samebits.cluster.signed import SignedStore
from samebits.errors import LaunchError
from samebits.launch.crew import shared_folder
from samebits.launch.crew.shared_folder import (
    NodeStatus,
    SharedFolder,
    describe_group,
    join_group,
    make_shared_folder,
    open_shared_folder,
)
from samebits.process_range import ProcessRange, RendezvousConfig


def rendezvous(folder: Path, **shared: str) -> RendezvousConfig:
    return RendezvousConfig(
        ProcessRange(1, 3), "127.0.0.1:29400", "run", 9.0, 1.0, node_timeout_s=2.0, folder=folder, shared=shared
    )


@contextmanager
def launcher(path: Path) -> Iterator[None]:
    """A launcher that writes its status."""
    shared = SharedFolder(path, 2.0)
    shared.publish(NodeStatus(shared.node))
    with shared.beating(NodeStatus(shared.node)):
        yield


@pytest.mark.parametrize("name", ["node-0.json", "record.json", "newest.json"])
@pytest.mark.parametrize("kind", ["fifo", "deep", "holes"])
def test_a_strangers_file_among_those_of_launchers_does_not_stop_a_run(tmp_path: Path, name: str, kind: str) -> None:
    file = tmp_path / ".crew" / "x" / name
    file.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.write_text("[" * 200_000)
    if kind == "holes":
        os.truncate(file, 1 << 40)
    assert join_group(rendezvous(tmp_path)) is None
    with launcher(make_shared_folder(tmp_path, "mine")):
        pass


def test_a_record_that_is_no_file_is_damaged(tmp_path: Path) -> None:
    path = make_shared_folder(tmp_path, "one")
    os.mkfifo(path / "record.json")
    with launcher(path), pytest.raises(LaunchError, match="another run trains in") as caught:
        join_group(rendezvous(tmp_path))
    assert caught.value.slots["given"] == "damaged"


def test_a_group_with_a_heartbeat_is_joined_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMEBITS_KEY", raising=False)
    path = make_shared_folder(tmp_path, "one")
    describe_group(path, rendezvous(tmp_path, lr="1"), "k" * 64)
    with launcher(path):
        joined = join_group(rendezvous(tmp_path, lr="1"))
        assert joined is not None
        assert joined[0].node == 1
        assert joined[1] == "k" * 64
        with pytest.raises(LaunchError, match="another run trains in") as caught:
            join_group(rendezvous(tmp_path, lr="2"))
        assert "lr: 1 there, 2 here" in str(caught.value)
        (path / ".rendezvous-key").chmod(0o644)
        with pytest.raises(LaunchError, match="other users have access"):
            join_group(rendezvous(tmp_path, lr="1"))
        (path / ".rendezvous-key").unlink()
        with pytest.raises(LaunchError, match="does not have the key"):
            join_group(rendezvous(tmp_path, lr="1"))
        monkeypatch.setenv("SAMEBITS_KEY", "m" * 64)
        joined = join_group(rendezvous(tmp_path, lr="1"))
        assert joined is not None
        assert joined[1] == "m" * 64


def test_files_without_a_heartbeat_are_no_group(tmp_path: Path) -> None:
    assert join_group(rendezvous(tmp_path)) is None
    path = make_shared_folder(tmp_path, "one")
    describe_group(path, rendezvous(tmp_path), "k" * 64)
    SharedFolder(path, 2.0).publish(NodeStatus(0))  # a run that was killed
    began = time.monotonic()
    assert join_group(rendezvous(tmp_path)) is None
    assert time.monotonic() - began < 60  # half a second at rest


def test_links_are_not_followed(tmp_path: Path) -> None:
    path = make_shared_folder(tmp_path / "other", "one")
    describe_group(path, rendezvous(tmp_path), "k" * 64)
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
    (tmp_path / "a" / ".crew").symlink_to(path.parent)
    (tmp_path / "b" / ".crew").mkdir()
    (tmp_path / "b" / ".crew" / "one").symlink_to(path)
    with launcher(path):
        assert join_group(rendezvous(tmp_path / "a")) is None
        assert join_group(rendezvous(tmp_path / "b")) is None


class NameOnly:
    """The launchers' store, of which only the shared folder's name is read."""

    def wait_for(self, key: str) -> str:
        return "one"


def test_a_folder_that_the_disk_shows_late_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = threading.Timer(0.3, make_shared_folder, (tmp_path, "one"))
    make.start()
    shared = open_shared_folder(cast(SignedStore, NameOnly()), rendezvous(tmp_path), "k" * 64, None)
    assert shared.node == 0
    monkeypatch.setattr(shared_folder, "VISIBLE_S", 0.1)
    (tmp_path / "other").mkdir()
    with pytest.raises(LaunchError, match="a disk that all machines share"):
        open_shared_folder(cast(SignedStore, NameOnly()), rendezvous(tmp_path / "other"), "k" * 64, None)
