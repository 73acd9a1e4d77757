"""Replays set torch's threads and algorithms, which the tests after them do not expect."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _as_before(torch_as_before: None) -> None:
    """Restore them."""


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of the honest run, to be changed."""
    return shutil.copytree(honest, tmp_path / "run")
