"""A run that several files of tests compare with."""

from pathlib import Path

import pytest

from tests.runs import TINY, samebits


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of the tiny recipe in one process. Not to be changed."""
    folder = tmp_path_factory.mktemp("tiny")
    samebits("train", TINY, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"
