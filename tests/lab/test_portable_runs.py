"""Portable arithmetic has one hash in many environments and on an emulated ARM processor; `auto` has several."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.portable_runs import OLDEST, RECIPES, ROWS, WITH_ADAMW, Row, can_run, hash_after_kills, hashes, name_of

FIRST = ROWS[0]
EVERY = (*RECIPES, *WITH_ADAMW)
ON_ARM = ("digits", "mnist", "classify", *WITH_ADAMW)  # a step takes seconds under QEMU
OPERATIONS = ("-m", "tests.lab.portable_operations")


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return hashes(FIRST, EVERY, "portable")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS[1:], ids=name_of)
def test_recipes_have_one_hash_in_each_environment(row: Row, wanted: dict[str, str]) -> None:
    if not can_run(row):
        pytest.skip("OLDEST_TORCH names no Python with the oldest supported torch")
    assert hashes(row, EVERY, "portable") == wanted


def test_operations_have_one_hash_with_the_oldest_torch() -> None:
    if not OLDEST:
        pytest.skip("OLDEST_TORCH names no Python with the oldest supported torch")
    old, new = (subprocess.check_output([python, *OPERATIONS], text=True) for python in (OLDEST, sys.executable))
    assert old.splitlines() == new.splitlines()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_killed_in_three_environments_has_the_same_hash(recipe: str, wanted: dict[str, str]) -> None:
    assert hash_after_kills([row for row in ROWS if can_run(row)][:4], recipe) == wanted[recipe]


@pytest.mark.timeout(1800)
def test_auto_has_several_hashes_in_these_environments() -> None:
    found = [hashes(row, ["digits", "mnist"], "auto") for row in ROWS[:3] if can_run(row)]
    assert all(len({each[recipe] for each in found}) > 1 for recipe in ("digits", "mnist"))


@pytest.mark.timeout(3600)
def test_an_arm_processor_has_the_same_hashes(tmp_path: Path, wanted: dict[str, str]) -> None:
    if os.geteuid() != 0 or shutil.which("dpkg") is None:
        pytest.skip("the emulated machine is made of Debian's packages, by root")
    subprocess.run(["tests/lab/aarch64", str(tmp_path)], check=True)
    python = str(tmp_path / "python")
    here, there = (subprocess.check_output([each, *OPERATIONS], text=True) for each in (sys.executable, python))
    assert there.splitlines() == here.splitlines()
    alone = ("", "", 1, 1, True, "newest")
    found = hashes(alone, ON_ARM, "portable", python)
    assert found == {recipe: wanted[recipe] for recipe in ON_ARM}
