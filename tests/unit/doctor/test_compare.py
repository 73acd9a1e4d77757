"""The odd rank out is named; data and code have fingerprints that change with them."""

import numpy as np
import pytest
import torch

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.doctor.compare import code_hash, compared, fingerprint


class Numbers:
    """Samples whose inputs are their own numbers."""

    def __init__(self, values: list[float]) -> None:
        self.values = torch.tensor(values)

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        return Batch({"x": self.values[indices]}, ["label"], torch.from_numpy(np.asarray(indices)))


def test_equal_facts_are_one_line() -> None:
    found = compared("torch", ["2.15.0"] * 3, ["a", "a", "b"])
    assert (found.value, found.verdict) == ("2.15.0 on all 3", "ok")


def test_the_odd_rank_is_named_with_its_machine_and_what_to_do() -> None:
    found = compared("torch", ["2.15.0", "2.15.0", "2.14.1"], ["a", "a", "b"])
    assert found.verdict == "problem"
    assert "2.14.1 on rank 2 (b)" in found.value
    assert "2.15.0 on ranks 0 1" in found.value
    assert found.fix == "pip install torch==2.15.0 on b"


def test_many_odd_ranks_are_counted() -> None:
    found = compared("data", ["x"] * 10 + ["y"] * 9, ["a"] * 19)
    assert "and 5 more" in found.value


@pytest.mark.parametrize("fact", ["processor", "device"])
def test_another_machine_is_a_warning_since_training_works_but_for_equal_bits(fact: str) -> None:
    assert compared(fact, ["EPYC", "Xeon"], ["a", "b"]).verdict == "warning"


def test_a_datasets_fingerprint_follows_its_size_and_what_is_read() -> None:
    first = fingerprint(Numbers([1, 2, 3, 4]))
    assert first.startswith("4 samples ")
    assert fingerprint(Numbers([1, 2, 3, 4])) == first
    assert fingerprint(Numbers([1, 2, 3, 5])) != first
    assert fingerprint(Numbers([1, 2, 3])) != first
    assert fingerprint(Numbers([])) == "0 samples"


def test_the_code_has_a_hash() -> None:
    assert len(code_hash()) == 12
    assert code_hash() == code_hash()
