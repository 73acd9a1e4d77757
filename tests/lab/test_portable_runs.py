"""Portable arithmetic has one hash in many environments and on an emulated ARM processor; `auto` has several."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab.portable_runs import RECIPES, ROWS, hashes

FIRST = ROWS[0]
ON_ARM = ("digits", "mnist", "classify")  # a step takes seconds under QEMU


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return hashes(FIRST, RECIPES, "portable")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: "-".join(str(each or "auto") for each in row))
def test_recipes_have_one_hash_in_each_environment(
    row: tuple[str, str, int, int, bool], wanted: dict[str, str]
) -> None:
    assert hashes(row, RECIPES, "portable") == wanted


@pytest.mark.timeout(1800)
def test_auto_has_several_hashes_in_these_environments() -> None:
    found = [hashes(row, ["digits", "mnist"], "auto") for row in (ROWS[0], ROWS[3], ROWS[6])]
    assert all(len({each[recipe] for each in found}) > 1 for recipe in ("digits", "mnist"))


@pytest.mark.timeout(3600)
def test_an_arm_processor_has_the_same_hashes(tmp_path: Path, wanted: dict[str, str]) -> None:
    if os.geteuid() != 0 or shutil.which("dpkg") is None:
        pytest.skip("the emulated machine is made of Debian's packages, by root")
    subprocess.run(["tests/lab/aarch64", str(tmp_path)], check=True)
    alone = ("", "", 1, 1, True)
    found = hashes(alone, ON_ARM, "portable", (str(tmp_path / "python"),))
    assert found == {recipe: wanted[recipe] for recipe in ON_ARM}
