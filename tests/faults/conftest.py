"""Reference runs for the tests of faults."""

from pathlib import Path

import pytest

from tests.faults.faults import SETTINGS
from tests.runs import TINY, samebits, weights


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of one process without faults."""
    folder = tmp_path_factory.mktemp("alone")
    samebits("train", TINY, *SETTINGS, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return weights(folder / "run")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: that of a socket in it may not be long."""
    return tmp_path_factory.mktemp("t")
