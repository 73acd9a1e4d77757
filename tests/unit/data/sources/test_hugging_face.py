"""Hugging Face datasets: their own formats and transforms, read in batches where that draws no random numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from samebits.data.keyed import keys
from samebits.data.samples import DatasetSamples
from samebits.errors import ConfigError

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
