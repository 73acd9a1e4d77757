"""Files of a dataset: named by patterns and lists, local and regular only, few of them open at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samebits.data.samples import DatasetSamples
from samebits.data.sources.local_files import MAX_OPEN, _opened
from samebits.data.sources.tar_shards import TarShards
from samebits.errors import ConfigError, DataError
from tests.unit.data.sources.source_files import write_tar


def open_shards(folder: Path) -> int:
    """Return how many files of a folder this process has open."""
    opened = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.readlink(each).startswith(str(folder)) for each in opened if os.path.lexists(each))


def test_more_shards_than_open_files_are_read(tmp_path: Path) -> None:
    count = MAX_OPEN + 3
    for number in range(count):
        write_tar(tmp_path / f"{number:03}.tar", [("0.cls", b"%d" % number)])
    shards = TarShards(tmp_path)
    order = [*range(count), 0, 2]
    assert [shards[number]["cls"] for number in order] == order
    assert open_shards(tmp_path) == MAX_OPEN
    _opened.cache_clear()
    assert open_shards(tmp_path) == 0


def test_a_pattern_a_folder_and_a_list_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        write_tar(tmp_path / f"s-{number:02d}.tar", [("0.cls", b"%d" % number)])
    (tmp_path / ".hidden.tar").write_text("")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    names = [f"s-{number:02d}.tar" for number in range(12)]
    for given_, expected in (
        (tmp_path, [str(tmp_path / name) for name in names]),
        ("s-*.tar", names),
        ("s-{00..11}.tar", names),
        ("s-0{0,3}.tar", ["s-00.tar", "s-03.tar"]),
        (["s-{10..11}.tar", Path("s-02.tar")], ["s-10.tar", "s-11.tar", "s-02.tar"]),
    ):
        shards = TarShards(given_)
        assert shards.files == expected
        assert DatasetSamples(shards).files == expected
        assert [sample["cls"] for sample in shards] == [int(name[-6:-4]) for name in expected]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("https://example.org/a.tar", ConfigError, "not a local file"),
        ("pipe:cat a.tar", ConfigError, "not a local file"),
        ("s3://bucket/{0..9}.tar", ConfigError, "not a local file"),
        ("-", ConfigError, "not a local file"),
        ("a-{0..99999999}.tar", ConfigError, "names 100,000,000 files"),
        ("missing.tar", DataError, "can't be read: No such file"),
        ("missing-{0..1}.tar", DataError, r"missing-0\.tar can't be read"),
        (["a.tar", "./a.tar"], DataError, r"\./a\.tar is listed twice"),
        (["a.tar", "*.tar"], DataError, "is listed twice"),
        ([], DataError, "the list of files is empty"),
        ("empty", DataError, r"has no files \*\.tar"),
        ("fifo.tar", DataError, "is not a regular file"),
        ("a\0.tar", DataError, "can't be read"),
    ],
)
@pytest.mark.timeout(30)
def test_a_name_of_no_local_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | list[str], kind: type[Exception], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tar(tmp_path / "a.tar", [("0.cls", b"1")])
    (tmp_path / "empty").mkdir()
    if name == "fifo.tar":
        os.mkfifo(name)
    with pytest.raises(kind, match=text):
        TarShards(name)
