"""Samples of a recipe's own dataset that cannot become a batch: the index, what was given, and what is expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.keyed import keys
from samebits.data.samples import Batch, DatasetSamples
from samebits.errors import ConfigError, DataError

FINE = torch.zeros(3, 4)


class Rows:
    """Five samples; that at index 3 is another one."""

    def __init__(self, odd: Any, usual: Any = (FINE, 1)) -> None:
        self._odd, self._usual = odd, usual

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self._odd if index == 3 else self._usual


class Tar:
    """Has samples, but no length."""

    def __getitem__(self, index: int) -> Any:
        return FINE, 1


def read(dataset: Any, collate: Callable[[Any], Any] | None = None) -> Batch:
    indices = np.array([0, 3, 1])
    return DatasetSamples(dataset, collate).batch(indices, keys(0, 0, indices))


NOT_PAIRS: dict[str, tuple[Any, str, str]] = {
    "dict": ({"image": FINE, "label": 1}, "a dict with image, label", "(row['image'], row['label'])"),
    "picture": ((Image.new("RGB", (5, 4)), 1), "a tuple of 2: a PIL image (5, 4), a int", "v2.ToImage()"),
    "text": (("a.jpg", 1), "a tuple of 2: a str, a int", "Return a tensor as input"),
    "bytes": ((b"", 1), "a tuple of 2: a bytes, a int", "Return a tensor as input"),
    "three": ((FINE, 1, 2), "a tuple of 3: a tensor (3, 4) float32, a int, a int", "Return two values"),
    "one": ((FINE,), "a tuple of 1: a tensor (3, 4) float32", "Return two values"),
    "tensor": (FINE, "a tensor (3, 4) float32", "Return (input, target)"),
    "array": (np.zeros((2, 2), np.uint8), "an array (2, 2) uint8", "Return (input, target)"),
    "none": (None, "None", "Return (input, target)"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_PAIRS)
def test_a_sample_that_is_no_pair_is_named_with_what_to_return(case: str) -> None:
    odd, given, fix = NOT_PAIRS[case]
    with pytest.raises(ConfigError, match="a sample of Rows is not a pair") as caught:
        read(Rows(odd))
    assert caught.value.slots["given"] == f"sample 3: {given}"
    assert caught.value.slots["allowed"].startswith("a pair (input, target)")
    assert fix in caught.value.slots["fix"]


CANT_JOIN: dict[str, tuple[Any, str]] = {
    "sizes": ((torch.zeros(3, 5), 1), "sample 3: a tuple of 2: a tensor (3, 5) float32, a int"),
    "target": ((FINE, None), "sample 3: a tuple of 2: a tensor (3, 4) float32, None"),
    "object": ((FINE, object()), "sample 3: a tuple of 2: a tensor (3, 4) float32, a object"),
}


@pytest.mark.parametrize("case", CANT_JOIN)
def test_samples_that_can_not_be_joined_are_shown_side_by_side(case: str) -> None:
    odd, given = CANT_JOIN[case]
    with pytest.raises(ConfigError, match="samples of Rows can't be joined to a batch") as caught:
        read(Rows(odd))
    assert caught.value.slots["given"].splitlines() == [
        "sample 0: a tuple of 2: a tensor (3, 4) float32, a int", given,
    ]  # fmt: skip
    assert "of equal shapes" in caught.value.slots["allowed"]


def test_arrays_numbers_and_dicts_of_them_are_inputs_and_a_function_may_take_anything() -> None:
    for inputs in (np.zeros((2, 2)), 1.5, {"image": FINE, "name": "a"}, [FINE, FINE]):
        assert len(read(Rows((inputs, 1), (inputs, 1)))) == 3
    batch = read(Rows("c", "a"), lambda items: (torch.zeros(len(items)), "".join(items)))
    assert batch.targets == "aca"
    with pytest.raises(ConfigError, match="a sample of Rows is not a pair") as caught:
        read(Rows("c", "a"), lambda items: {"all": items})
    assert caught.value.slots["given"] == "after collation: a dict with all"


def test_a_dataset_without_a_length_is_told_to_have_one() -> None:
    with pytest.raises(ConfigError, match="Tar is a stream: it has no sample at an index") as caught:
        read(Tar())
    assert caught.value.slots["fix"].startswith("Give it a __len__ that returns the number of samples.")


def test_an_error_of_a_dataset_has_the_index_of_the_sample() -> None:
    class Raises(Rows):
        def __getitem__(self, index: int) -> Any:
            return {0: (FINE, 1), 3: (FINE, 1)}[index]

    with pytest.raises(DataError, match="sample 1 of Raises raised KeyError: 1") as caught:
        read(Raises(None))
    line = inspect.getsourcelines(Raises)[1] + 2
    assert caught.value.slots["where"] == f"{__file__}:{line}, in __getitem__"
    assert isinstance(caught.value.__cause__, KeyError)
