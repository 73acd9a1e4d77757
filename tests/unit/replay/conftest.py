"""A run to be changed, for the tests of replays."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy of the honest run, to be changed."""
    return shutil.copytree(honest, tmp_path / "run")
