"""The cache of decoded images: equal bits, within its limit, complete files only."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from samebits.data import decoded
from samebits.data.decoded import DecodedPictures
from samebits.data.images import read_rgb
from samebits.errors import DataError
from samebits.scratch import partial_path


def picture(path: Path, seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("??/*"))


def test_what_is_kept_comes_back_bit_for_bit(tmp_path: Path) -> None:
    pixels = picture(tmp_path / "a.png")
    kept = DecodedPictures(tmp_path / "kept", 10**6)
    assert kept.read(tmp_path / "a.png", 1) is None
    kept.keep(tmp_path / "a.png", 1, pixels)
    for again in (kept, DecodedPictures(tmp_path / "kept", 10**6)):
        found = again.read(tmp_path / "a.png", 1)
        assert found is not None
        assert np.array_equal(found, pixels)
        assert again.read(tmp_path / "a.png", 2) is None


def test_writing_into_what_was_read_changes_nothing_on_disk(tmp_path: Path) -> None:
    pixels = picture(tmp_path / "a.png")
    kept = DecodedPictures(tmp_path / "kept", 10**6)
    kept.keep(tmp_path / "a.png", 1, pixels)
    first = kept.read(tmp_path / "a.png", 1)
    assert first is not None
    first[:] = 0
    assert np.array_equal(kept.read(tmp_path / "a.png", 1), pixels)


def test_a_picture_that_changed_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    kept = DecodedPictures(tmp_path / "kept", 10**6)
    kept.keep(tmp_path / "a.png", 1, picture(tmp_path / "a.png"))
    picture(tmp_path / "a.png", seed=1)
    os.utime(tmp_path / "a.png", ns=(1, 1))
    assert kept.read(tmp_path / "a.png", 1) is None


def test_the_folder_is_not_filled_beyond_its_limit(tmp_path: Path) -> None:
    kept = DecodedPictures(tmp_path / "kept", 10_000)
    for number in range(9):
        path = tmp_path / f"{number}.png"
        kept.keep(path, 1, picture(path, number))
    assert 0 < size_of(tmp_path / "kept") <= 10_000
    DecodedPictures(tmp_path / "kept", 10_000).keep(tmp_path / "a.png", 1, picture(tmp_path / "a.png"))
    assert size_of(tmp_path / "kept") <= 10_000


@pytest.mark.parametrize("damage", ["cut", "zeros", "other", "empty"])
def test_a_damaged_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    pixels = picture(tmp_path / "a.png")
    DecodedPictures(tmp_path / "kept", 10**6).keep(tmp_path / "a.png", 1, pixels)
    (file,) = (tmp_path / "kept").glob("??/*")
    content = file.read_bytes()
    changed = {
        "cut": content[:-5],
        "zeros": content[:100] + bytes(len(content) - 100),
        "other": b"x" * 50,
        "empty": b"",
    }
    file.write_bytes(changed[damage])
    # A power failure can leave zeros in a file; the machine was booted again after it.
    monkeypatch.setattr(decoded, "_boot", lambda: b"another start...")
    assert DecodedPictures(tmp_path / "kept", 10**6).read(tmp_path / "a.png", 1) is None


def test_after_a_reboot_intact_files_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = picture(tmp_path / "a.png")
    DecodedPictures(tmp_path / "kept", 10**6).keep(tmp_path / "a.png", 1, pixels)
    monkeypatch.setattr(decoded, "_boot", lambda: b"another start...")
    assert np.array_equal(DecodedPictures(tmp_path / "kept", 10**6).read(tmp_path / "a.png", 1), pixels)


def test_a_folder_that_is_deleted_while_in_use_does_no_harm(tmp_path: Path) -> None:
    kept = DecodedPictures(tmp_path / "kept", 10**6)
    (tmp_path / "kept" / "used").unlink()
    (tmp_path / "kept").rmdir()
    kept.keep(tmp_path / "a.png", 1, picture(tmp_path / "a.png"))
    assert kept.read(tmp_path / "a.png", 1) is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.cache|decoded pictures"):
        DecodedPictures(tmp_path / "file" / "kept", 10**6)


WRITER = """
import sys
from pathlib import Path
from samebits.data.decoded import DecodedPictures
from samebits.data.images import read_rgb
kept = DecodedPictures(Path(sys.argv[1]) / "kept", 10**6)
print("ready", flush=True)
while True:
    for path in sorted(Path(sys.argv[1]).glob("*.png")):
        kept.keep(path, 1, read_rgb(path))
        for file in (Path(sys.argv[1]) / "kept").glob("??/*"):
            if int(file.name[:1], 16) % 2:
                file.unlink(missing_ok=True)
"""


def test_writers_that_are_killed_leave_only_whole_pictures(tmp_path: Path) -> None:
    for number in range(6):
        picture(tmp_path / f"{number}.png", number)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    time.sleep(0.3)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    kept = DecodedPictures(tmp_path / "kept", 10**6)
    for number in range(6):
        path = tmp_path / f"{number}.png"
        found = kept.read(path, 1)
        assert found is None or np.array_equal(found, read_rgb(path))
        kept.keep(path, 1, read_rgb(path))  # and it can be gone on with
    assert size_of(tmp_path / "kept") <= 10**6


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_the_users_in_the_folder_is_not_written_over(tmp_path: Path, is_link: bool) -> None:
    mine = tmp_path / ("mine" if is_link else "used")
    mine.write_text("mine")
    if is_link:
        (tmp_path / "used").symlink_to(mine)
    with pytest.raises(DataError, match="can't be used"):
        DecodedPictures(tmp_path, 10**6)
    assert mine.read_text() == "mine"


def test_partial_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = partial_path(tmp_path / "partial" / "abc")
    left.parent.mkdir()
    left.with_name(left.name.replace(str(os.getpid()), str(dead.pid))).touch()
    left.touch()
    DecodedPictures(tmp_path, 10**6)
    assert list(left.parent.iterdir()) == [left]


def _link(name: str) -> Callable[[Path], object]:
    return lambda folder: (
        (folder.parent / "elsewhere").mkdir() or (folder / name).symlink_to(folder.parent / "elsewhere")
    )


def _hard_link(folder: Path) -> None:
    (folder.parent / "mine").write_text("12")
    (folder / "used").hardlink_to(folder.parent / "mine")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda folder: os.mkfifo(folder / "used"), "entry used"),
        (_hard_link, "entry used"),
        (_link("partial"), "partial in it is a link"),
        (_link("0a"), "0a in it is a link"),
        (lambda folder: folder.chmod(0o777), "every user can write to it"),
    ],
    ids=["FIFO", "hard link", "link for partial files", "link for pictures", "open to all"],
)
def test_a_strangers_folder_is_refused_and_nothing_is_written_elsewhere(
    tmp_path: Path, prepare: Callable[[Path], object], reason: str
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(DataError, match=reason):
        DecodedPictures(folder, 10**6)
    assert not (tmp_path / "elsewhere").is_dir() or not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "mine").exists() or (tmp_path / "mine").read_text() == "12"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(DataError, match="belongs to another user"):
        DecodedPictures(tmp_path, 10**6)


@pytest.mark.parametrize("stranger", ["FIFO", "link", "device", "other size", "no pixels"])
def test_a_strangers_file_in_the_place_of_a_picture_is_not_used(tmp_path: Path, stranger: str) -> None:
    pixels = picture(tmp_path / "a.png")
    kept = DecodedPictures(tmp_path / "kept", 10**6)
    kept.keep(tmp_path / "a.png", 1, pixels)
    (file,) = (tmp_path / "kept").glob("??/*")
    content = file.read_bytes()
    file.unlink()
    if stranger == "FIFO":
        os.mkfifo(file)
    elif stranger in ("link", "device"):
        file.symlink_to("/dev/zero" if stranger == "device" else file.with_name("x"))
        file.with_name("x").write_bytes(content)
    elif stranger == "other size":
        file.write_bytes(content[:8] + struct.pack("<II", 40, 30) + content[16:])
    else:
        file.write_bytes(content[:8] + struct.pack("<II", 0, 5) + content[16:36])
    assert kept.read(tmp_path / "a.png", 1, (40, 30)) is None
    kept.keep(tmp_path / "a.png", 1, pixels)
