"""Shared fixtures of recipes' tests, and the places of data that is not in the repository."""

from pathlib import Path

import pytest


class _Parity(type(Path())):  # type: ignore[misc]  # Path itself can't be derived from in Python 3.11
    """A folder in which a test that looks for a file that is not there is skipped."""

    def __truediv__(self, name: str) -> Path:
        path = Path(self, name)
        if not path.exists():
            pytest.skip(f"../shared/parity/{name} is not there")
        return path


@pytest.fixture(scope="session")
def parity_folder(repo: Path) -> Path:
    """What the official implementations answer, as numbers: ../shared/parity, or the small part that is in the repo."""
    whole = repo.parent / "shared" / "parity"
    return _Parity(whole if whole.is_dir() else repo / "tests" / "fixtures" / "parity")


@pytest.fixture(scope="session")
def pose_folder(repo: Path) -> Path:
    """The pose sample data: ../shared/data/pose with coco/ and crowdpose/."""
    return _beside(repo, "data/pose")


def _beside(repo: Path, name: str) -> Path:
    folder = repo.parent / "shared" / name
    if not folder.is_dir():
        pytest.skip(f"../shared/{name} is not there")
    return folder
