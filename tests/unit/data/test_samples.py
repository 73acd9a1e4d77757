"""The contract of datasets: two required methods, optional parts, with or without the base class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from samebits.data.keyed import IntArray, KeyArray, keys
from samebits.data.loader import Loader, Request, choose_num_workers
from samebits.data.samples import Batch, Samples, as_samples, groups_of

CPU = torch.device("cpu")


class Own:
    """A dataset with the required parts only, without the base class."""

    def __len__(self) -> int:
        return 4

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        return Batch(torch.from_numpy(indices).float(), None, torch.from_numpy(indices))


class OwnWithAll(Own):
    is_costly = True
    groups = np.array([0, 0, 1, 1])
    files = ("a.png", "b.png")

    def finish(self, batch: Batch) -> Batch:
        return replace(batch, inputs=batch.inputs + 100)


class Derived(Own, Samples):
    """The same with the base class."""


class DerivedWithAll(OwnWithAll, Samples):
    """The same with the base class."""


def loaded(samples: Own) -> list[float]:
    indices = np.arange(4)
    request = indices, keys(0, 0, indices)

    def requests() -> Iterator[Request]:
        yield request

    return list(Loader(samples, requests, CPU).batch(*request).inputs.tolist())


@pytest.mark.parametrize("samples", [Derived(), Own()], ids=["derived", "own"])
def test_optional_parts_have_defaults(samples: Own) -> None:
    parts = as_samples(samples)
    assert (parts.is_costly, parts.groups, parts.files, parts.finish) == (False, None, None, None)
    assert len(parts) == 4
    assert groups_of(samples) is None
    assert choose_num_workers("auto", samples, torch.device("cuda"), num_ranks_here=1) == 0
    assert loaded(samples) == [0, 1, 2, 3]


@pytest.mark.parametrize("samples", [DerivedWithAll(), OwnWithAll()], ids=["derived", "own"])
def test_optional_parts_are_used(samples: Own) -> None:
    parts = as_samples(samples)
    assert (parts.is_costly, parts.files) == (True, ("a.png", "b.png"))
    groups = groups_of(samples)
    assert groups.tolist() == [0, 0, 1, 1]
    assert choose_num_workers("auto", samples, torch.device("cuda"), num_ranks_here=1) >= 1
    assert loaded(samples) == [100, 101, 102, 103]


def test_a_derived_dataset_is_used_as_it_is() -> None:
    samples = Derived()
    assert as_samples(samples) is samples


def test_a_missing_required_part_is_named() -> None:
    with pytest.raises(NotImplementedError, match="Samples has no batch"):
        Samples().batch(np.arange(1), keys(0, 0, np.arange(1)))
    with pytest.raises(NotImplementedError, match="Samples has no __len__"):
        len(Samples())
