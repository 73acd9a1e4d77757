"""Each test in a folder of its own, with Python put back as it was."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from samebits.cli.main import run as command
from samebits.recipes.trust import trust
from tests.unit.inference.whole_runs import RECIPE, SETTINGS


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("recipe_of_dots", None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is complete, beside its data."""
    place = tmp_path_factory.mktemp("strange")
    (place / "dots").mkdir()
    (place / "dots" / "classes.txt").write_text("dark bright")
    Image.new("L", (2, 2), 250).save(place / "dot.png")
    before, path = os.getcwd(), list(sys.path)
    os.chdir(place)
    try:
        assert command(["train", str(RECIPE), *SETTINGS, "--procs", "1", "--run-dir", "run"]) == 0
    finally:
        os.chdir(before)
        sys.path[:] = path
    return place


@pytest.fixture
def run(whole: Path) -> Path:
    """A copy of it in the current folder."""
    shutil.copytree(whole, ".", dirs_exist_ok=True)
    trust(RECIPE)
    return Path("run")
