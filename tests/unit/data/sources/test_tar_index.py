"""The index of a tar shard is made once, in a folder of the user, and never trusted blindly."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.data.sources import tar_shards
from samebits.data.sources.tar_shards import TarShards
from samebits.errors import DataError
from tests.unit.data.sources.source_files import write_tar


def index_files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*.npz")}


def test_the_index_is_made_once_and_again_only_for_a_changed_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [write_tar(tmp_path / f"{name}.tar", [(f"{name}.cls", b"1")]) for name in "ab"]
    made: list[str] = []
    build = tar_shards.build_index
    monkeypatch.setattr(tar_shards, "build_index", lambda path: (made.append(Path(path).name), build(path))[1])
    folder = tmp_path / "index"
    for _ in range(2):
        assert [sample["__key__"] for sample in TarShards(shards, index_dir=folder)] == ["a", "b"]
    assert made == ["a.tar", "b.tar"]
    write_tar(shards[1], [("c.cls", b"1"), ("d.cls", b"2")])
    assert [sample["__key__"] for sample in TarShards(shards, index_dir=folder)] == ["a", "c", "d"]
    assert made == ["a.tar", "b.tar", "b.tar"]
    assert len(list(folder.glob("*.npz"))) == 2


@pytest.mark.parametrize("position", [0, 100, -100, -1])
def test_a_damaged_index_is_made_again(tmp_path: Path, position: int) -> None:
    shard = write_tar(tmp_path / "a.tar", [("0.cls", b"1"), ("0.txt", b"x")])
    expected = TarShards(shard, index_dir=tmp_path)[0]
    (file,) = tmp_path.glob("*.npz")
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[position] ^= 1
    for content in (bytes(damaged), whole[:position] if position > 0 else b"", bytes(len(whole)), b""):
        file.write_bytes(content)
        assert TarShards(shard, index_dir=tmp_path)[0] == expected


def test_a_folder_for_indexes_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard = write_tar(tmp_path / "a.tar", [("0.cls", b"1")])
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(DataError, match="every user can write to it"):
        TarShards(shard, index_dir=folder)
    # The default folder is a convenience: without it the index is made each time.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(TarShards(shard)) == 1
    assert "indexes of tar shards are not kept" in caplog.text


def test_the_default_folder_is_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    TarShards(write_tar(tmp_path / "a.tar", [("0.cls", b"1")]))
    assert len(index_files(tmp_path / "cache" / "samebits" / "tar-index")) == 1
    assert [path.name for path in tmp_path.glob("*.tar*")] == ["a.tar"]
