"""Shared fixtures of the engine's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.storage.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    yield folder
    folder.close()
