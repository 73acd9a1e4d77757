"""Names of files, and samples written as a stream or in Hugging Face's form."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from samebits.data.keyed import keys
from samebits.data.samples import DatasetSamples
from samebits.data.sources.local_files import MAX_OPEN, _opened
from samebits.data.sources.tar_shards import TarShards
from samebits.errors import ConfigError, DataError
from samebits.own_loop.samples import source_of
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


if TYPE_CHECKING:
    import datasets  # takes a second


@pytest.fixture
def stored(tmp_path: Path) -> datasets.Dataset:
    """A dataset of 12 samples in Arrow files on the disk."""
    import datasets

    made = datasets.Dataset.from_dict(
        {
            "x": [[float(number), 1.0] for number in range(12)],
            "label": list(range(12)),
            "text": [f"t{n}" for n in range(12)],
        }
    )
    datasets.disable_progress_bars()
    made.save_to_disk(str(tmp_path / "stored"), num_shards=3)
    return datasets.load_from_disk(str(tmp_path / "stored"))


def pairs(items: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    return torch.stack([torch.as_tensor(item["x"]) for item in items]), torch.tensor(
        [int(item["label"]) for item in items]
    )


def read(dataset: object, indices: list[int], epoch: int = 0) -> tuple[Tensor, Tensor]:
    array = np.array(indices)
    batch = DatasetSamples(dataset, pairs).batch(array, keys(0, epoch, array))
    return batch.inputs, batch.targets


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_a_batch_is_what_single_samples_are_in_every_format(
    stored: datasets.Dataset, form: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = stored.with_format(form)
    indices = [7, 0, 11, 3]
    singles = [dataset[index] for index in indices]
    fetched: list[list[int]] = []
    import datasets

    fetch = datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset, "__getitems__", lambda self, chosen: (fetched.append(chosen), fetch(self, chosen))[1]
    )
    items: list[Any] = []
    array = np.array(indices)
    DatasetSamples(dataset, lambda batch: (items.extend(batch), 0)[1:] * 2).batch(array, keys(0, 0, array))
    assert fetched == [indices]
    assert repr(items) == repr(singles)


def test_a_transform_of_the_dataset_draws_each_samples_own_random_numbers(stored: datasets.Dataset) -> None:
    def jitter(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        batch["x"] = [torch.tensor(x) + random.random() + torch.rand(()) for x in batch["x"]]
        return batch

    stored.set_transform(jitter)
    together, labels = read(stored, [5, 2, 9])
    assert labels.tolist() == [5, 2, 9]
    assert torch.equal(together[1], read(stored, [2])[0][0])
    assert torch.equal(together, torch.cat([read(stored, [index])[0] for index in (5, 2, 9)]))
    assert not torch.equal(together, read(stored, [5, 2, 9], epoch=1)[0])


def test_selected_shuffled_and_wrapped_datasets_are_read_by_their_own_indices(stored: datasets.Dataset) -> None:
    chosen = stored.select([9, 3, 5]).shuffle(seed=1)
    expected = [chosen[index]["label"] for index in range(3)]
    assert sorted(expected) == [3, 5, 9]
    assert read(chosen, [0, 1, 2])[1].tolist() == expected
    assert read(torch.utils.data.Subset(stored, [4, 8]), [1, 0])[1].tolist() == [8, 4]


def test_dicts_without_a_collate_function_are_refused_with_what_to_pass(stored: datasets.Dataset) -> None:
    indices = np.array([1, 2])
    with pytest.raises(ConfigError, match=r"is not a pair \(input, target\)") as error:
        DatasetSamples(stored).batch(indices, keys(0, 0, indices))
    assert "collate=" in error.value.slots["fix"]


def test_a_streamed_dataset_is_refused(stored: datasets.Dataset) -> None:
    with pytest.raises(ConfigError, match="IterableDataset is a stream") as error:
        DatasetSamples(stored.to_iterable_dataset())
    assert "load_dataset without streaming=True" in error.value.slots["fix"]
