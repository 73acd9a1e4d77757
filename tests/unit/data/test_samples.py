"""Datasets of users: samples, how they are joined, and files that are not used."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.keyed import IntArray, KeyArray, keys
from samebits.data.loader import Loader, Request, choose_num_workers
from samebits.data.names import left_out_row, overlap_rows, walk
from samebits.data.samples import Batch, DatasetSamples, Samples, as_samples, groups_of
from samebits.errors import ConfigError, DataError

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


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def test_other_files_are_counted_and_folders_of_the_system_are_not_listed(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/2.PNG", "a/3.HEIC", "a/4.heic", "a/5.avif", "a/Thumbs.db", "a/.DS_Store", "a/._1.jpg")
    touch(tmp_path, "a/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg", "a/deep/__MACOSX/x.png", "a/deep/6.jpg", "a/README")
    touch(tmp_path, "a/.ipynb_checkpoints/1-checkpoint.jpg", "a/deep/lost+found/text.txt")
    counts: Counter[str] = Counter()
    assert sorted(walk(tmp_path, "a", counts)) == ["a/1.jpg", "a/2.PNG", "a/deep/6.jpg"]
    assert counts == {
        ".heic": 2, ".avif": 1, "._*": 1, "without an ending": 1,
    }  # fmt: skip
    assert walk(tmp_path, "a") == walk(tmp_path, "a", Counter())


def test_the_row_of_files_left_out_begins_with_the_most(tmp_path: Path) -> None:
    assert left_out_row({}) == ""
    assert left_out_row({"in @eaDir": 1, ".heic": 4000}) == "4,000 files .heic, 1 file in @eaDir"
    assert left_out_row({f".{number}": 1 for number in range(9)}).endswith("1 file .5 …")


def test_images_in_both_sets_and_repeated_ones_are_counted() -> None:
    assert overlap_rows(["a", "b"], ["c"]) == {}
    rows = overlap_rows(["a", "b", "b", "b"], ["c", "a"])
    assert rows["validation"] == "warning: 1 of 2 images are training images too"
    assert rows["training"] == "warning: 2 of 4 images are listed again, maybe with another label"
    assert overlap_rows(iter(()), iter(())) == {}
