"""Streams have no order to keep: they are refused, or written once to shards that have one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from samebits.data.samples import DatasetSamples
from samebits.data.sources.tar_shards import TarShards
from samebits.data.sources.tar_writer import write_tar_shards
from samebits.errors import ConfigError, DataError
from samebits.own_loop.samples import source_of


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return 3


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "given_"),
    [
        (Stream(), "an IterableDataset"),
        (StreamWithLength(), "an IterableDataset"),
        (Endless(), "no __len__"),
        ((number for number in range(3)), "no __len__ and no __getitem__"),
        (DataLoader([1, 2, 3]), "no __getitem__"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_stream_is_refused_with_what_to_do(dataset: object, given_: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{type(dataset).__name__} is a stream: it has no sample at an index"
    ) as error:
        DatasetSamples(dataset)
    assert error.value.slots["given"] == given_
    assert "samebits.write_tar_shards(stream, folder)" in error.value.slots["fix"]


def test_a_stream_in_a_loop_of_the_users_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="Stream is a stream: it has no sample at an index"):
        source_of(DataLoader(Stream()))


def values(numbers: list[int]) -> Iterator[dict[str, Any]]:
    for number in numbers:
        array = np.full(number % 5, number, np.int64)
        yield {"__url__": "x", "cls": number, "txt": f"é{number}", "npy": array, "json": {"n": [number, None]}}


@settings(max_examples=15)
@given(
    numbers=st.lists(st.integers(-5, 1 << 40), min_size=1, max_size=12), max_bytes=st.sampled_from([1, 9000, 1 << 20])
)
def test_a_stream_that_was_written_once_has_every_sample_at_an_index(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], max_bytes: int
) -> None:
    folders = [tmp_path_factory.mktemp("s") / "made" for _ in range(2)]
    written = [write_tar_shards(values(numbers), folder, max_shard_bytes=max_bytes) for folder in folders]
    assert [Path(path).name for path in written[0]] == sorted(path.name for path in folders[0].iterdir())
    assert (len(written[0]) == len(numbers)) == (max_bytes == 1 or len(numbers) == 1)
    shards = TarShards(folders[0])
    assert len(shards) == len(numbers)
    for index, number in enumerate(numbers):
        sample = shards[index]
        assert sample.pop("npy").tolist() == [number] * (number % 5)
        key = f"{index:09d}"
        assert sample == {"__key__": key, "cls": number, "txt": f"é{number}", "json": {"n": [number, None]}}
    one, two = ([Path(path).read_bytes() for path in paths] for paths in written)
    assert one == two


def test_tensors_and_names_of_the_users_are_written(tmp_path: Path) -> None:
    write_tar_shards([{"__key__": "n01/a", "seg.npy": torch.arange(3), "cls": np.int64(4), "bin": b"\0"}], tmp_path)
    sample = TarShards(tmp_path)[0]
    assert sample.pop("seg.npy").tolist() == [0, 1, 2]
    assert sample == {"__key__": "n01/a", "cls": 4, "bin": b"\0"}


def broken(numbers: list[int]) -> Iterator[dict[str, Any]]:
    yield from values(numbers)
    raise RuntimeError("the stream broke")


def test_an_interrupted_stream_leaves_no_shards(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the stream broke"):
        write_tar_shards(broken([1, 2, 3]), tmp_path / "s", max_shard_bytes=1)
    assert list((tmp_path / "s").iterdir()) == []


def test_a_folder_with_shards_is_not_written_to(tmp_path: Path) -> None:
    (path,) = write_tar_shards(values([1]), tmp_path)
    before = Path(path).read_bytes()
    with pytest.raises(ConfigError, match="has tar files already"):
        write_tar_shards(values([2]), tmp_path)
    assert Path(path).read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [Path(path).name]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([{"cls": object()}], "cannot be written to a shard without pickle"),
        ([{"npy": np.array([object()])}], "cannot be written to a shard without pickle"),
        ([{"txt": "\ud800"}], "cannot be written to a shard without pickle"),
        ([{"jpg": np.zeros((2, 2, 3), np.uint8)}], r"an array is written as \.npy"),
        ([{"__key__": "a.b", "cls": 1}], r"cannot be named a\.b\.cls"),
        ([{"__key__": "../a", "cls": 1}], "cannot be named"),
        ([{"__key__": "/a", "cls": 1}], "cannot be named"),
        ([{"__key__": "a//b", "cls": 1}], "cannot be named"),
        ([{"CLS": 1}], "cannot be named"),
        ([{"__key__": "a"}], "sample 0 has no values"),
        ([{"__key__": "a", "cls": 1}, {"__key__": "a", "cls": 2}], "sample 1 has the key a, as an earlier one"),
    ],
)
def test_a_sample_that_a_shard_cannot_hold_is_named(tmp_path: Path, samples: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        write_tar_shards(samples, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_stream_and_a_folder_that_is_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the stream has no samples"):
        write_tar_shards([], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't be written"):
        write_tar_shards(values([1]), tmp_path / "file")
