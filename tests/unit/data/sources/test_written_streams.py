"""Streams have no order to keep: they are refused, with what writes them to files that have one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from samebits.data.samples import DatasetSamples
from samebits.errors import ConfigError
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
    assert "datasets.Dataset.from_generator(...).save_to_disk(folder)" in error.value.slots["fix"]


def test_a_stream_in_a_loop_of_the_users_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="Stream is a stream: it has no sample at an index"):
        source_of(DataLoader(Stream()))
