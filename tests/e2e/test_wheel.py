"""The wheel, installed into a virtual environment that has what its metadata asks for and nothing else.

torch and the other packages are links to those that run this test, so nothing is downloaded. The checkout is not on the
path of the environment.
"""

import importlib.metadata as metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from samebits.version import __version__

BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the files that the build reads."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy2(repo / name, copy)
    shutil.copytree(repo / "src" / "samebits", copy / "src" / "samebits", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (path,) = (copy / "dist").iterdir()
    return path


def test_the_wheel_has_every_file_of_the_package_and_its_version(wheel: Path, repo: Path) -> None:
    assert wheel.name == f"samebits-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("samebits/")}
        description = message_from_bytes(archive.read(f"samebits-{__version__}.dist-info/METADATA"))
    sources = repo / "src"
    tracked = subprocess.run(["git", "ls-files"], cwd=sources, capture_output=True, text=True).stdout.split()
    present = tracked or [str(path.relative_to(sources)) for path in sources.rglob("*.*") if path.is_file()]
    assert {name for name in present if "__pycache__" not in name} - {"ruff.toml"} <= inside
    assert not any("test" in Path(name).parts[0] for name in inside)
    assert (description["Name"], description["Version"]) == ("samebits", __version__)


def _core(wheel: Path) -> dict[str, metadata.Distribution]:
    """The distributions that the wheel needs without extras, and those that they need."""
    with zipfile.ZipFile(wheel) as archive:
        description = message_from_bytes(archive.read(f"samebits-{__version__}.dist-info/METADATA"))
    waiting = _requirements(description.get_all("Requires-Dist", []), set())
    seen: set[tuple[str, frozenset[str]]] = set()
    found: dict[str, metadata.Distribution] = {}
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            found[name] = metadata.distribution(name)
            waiting += _requirements(found[name].requires or [], extras)
    return found


def _requirements(lines: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    requirements = map(Requirement, lines)
    chosen = ("", *extras)
    return [each for each in requirements if not each.marker or any(each.marker.evaluate({"extra": e}) for e in chosen)]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with the wheel and the core's dependencies."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    core = _core(wheel)
    assert not {"torchvision", "scikit-learn", "matplotlib", "opencv-python-headless", "scipy"} & set(core)
    for found in core.values():
        for name in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / name).exists():
                (site / name).symlink_to(found.locate_file(name))
    # pip runs from this test's environment, and installs into the other one.
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install"]
    done = subprocess.run(
        [*pip, "-q", "--no-index", "--disable-pip-version-check", str(wheel)],
        capture_output=True, text=True, timeout=180, env=_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "bin" / "python"


def _environment() -> dict[str, str]:
    hidden = ("PYTHON", "PIP_", "PYTEST_")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | {"COLUMNS": "100"}


def _run(*command: object, cwd: Path) -> str:
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_installed_wheel_trains_digits_and_predicts(python: Path, tmp_path: Path, repo: Path) -> None:
    command = python.parent / "samebits"
    assert _run(command, "--version", cwd=tmp_path).strip() == f"samebits {__version__}"
    place = _run(python, "-c", "import samebits; print(samebits.__file__)", cwd=tmp_path)
    assert place.startswith(str(python.parents[1]))
    said = _run(command, "train", "digits", "epochs=2", "--procs", "2", "--run-dir", "run", cwd=tmp_path)
    assert "1,437 training, 360 validation: UCI digits" in said
    assert 'pip install "samebits[trackers]"' in said
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 46
    assert "probability" in _run(command, "predict", "run", repo / "docs/pictures/digit.png", cwd=tmp_path)
    # The package's data: presets and the recipes' READMEs.
    assert "micro_batch" in _run(command, "config", "pose", cwd=tmp_path)
    train = [command, "train", "pose", "data.root=."]
    done = subprocess.run(train, cwd=tmp_path, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert 'Run pip install "samebits[pose]".' in done.stderr
