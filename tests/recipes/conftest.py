"""Where the tests of recipes find what is too big, or not ours, to be in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def parity_folder(repo: Path) -> Path:
    """What the official implementations answer, as numbers: ../shared/parity."""
    return _beside(repo, "parity")


@pytest.fixture(scope="session")
def pose_folder(repo: Path) -> Path:
    """The pose sample data: ../shared/data/pose with coco/ and crowdpose/."""
    return _beside(repo, "data/pose")


def _beside(repo: Path, name: str) -> Path:
    folder = repo.parent / "shared" / name
    if not folder.is_dir():
        pytest.skip(f"../shared/{name} is not there")
    return folder
