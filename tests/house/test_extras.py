"""pyproject.toml and src/samebits/extras.py have the same extras, and a missing one is named with its pip line."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from samebits import extras
from samebits.errors import ConfigError
from tests.runs import environment


def _project(repo: Path) -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((repo / "pyproject.toml").read_text())["project"]


def test_each_extra_installs_the_modules_that_are_looked_for(repo: Path) -> None:
    declared = _project(repo)["optional-dependencies"]
    names = importlib.metadata.packages_distributions()
    for extra, modules in extras.EXTRAS.items():
        installed = {canonicalize_name(name) for module in modules for name in names[module]}
        wanted = {canonicalize_name(Requirement(text).name) for text in declared[extra]}
        assert wanted <= installed, extra
        assert len(modules) == len(wanted), extra


def test_all_has_every_extra(repo: Path) -> None:
    project = _project(repo)
    assert project["name"] == extras.DISTRIBUTION
    text, _ = project["optional-dependencies"]["all"]
    assert Requirement(text).extras >= set(extras.EXTRAS)


def test_only_history_has_the_former_name(repo: Path) -> None:
    """The former name belongs to others on the package index: an install line with it fetches a stranger's code."""
    former = "lock" + "step"
    history = ("CHANGELOG.md", "docs/adr/")
    listed = subprocess.run(["git", "ls-files"], cwd=repo, capture_output=True, text=True).stdout.split()
    names = [name for name in listed if not name.startswith(history) and (repo / name).is_file()]
    assert [name for name in names if former in name or former.encode() in (repo / name).read_bytes().lower()] == []


def test_the_core_has_few_dependencies(repo: Path) -> None:
    names = {Requirement(text).name for text in _project(repo)["dependencies"]}
    assert names == {
        "cloudpickle", "mpmath", "torch", "numpy", "pillow", "psutil", "pydantic", "pyyaml", "rich", "safetensors",
        "typer",
    }  # fmt: skip


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)  # as Python has it for what can't be imported
    with pytest.raises(ConfigError, match="recipe pose needs scipy, which is not installed") as caught:
        extras.require_recipe("pose")
    assert caught.value.slots["fix"] == 'Run pip install "samebits[pose]".'
    extras.require_recipe("mnist")


# Started with these modules blocked, as in an environment of the core alone.
CORE_ONLY = """
import sys
for name in {modules!r}:
    sys.modules[name] = None
from samebits.cli.main import run
sys.exit(run({arguments!r}))
"""


def _core_only(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    modules = sorted({module for names in extras.EXTRAS.values() for module in names} | {"sklearn", "torchvision"})
    code = CORE_ONLY.format(modules=modules, arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=180
    )


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["train", "classify", "data.root=."], "classify"),
        (["train", "pose", "data.root=."], "pose"),
        (["train", "own.py"], "classify"),
    ],
)
def test_a_command_that_needs_an_extra_says_how_to_install_it(arguments: list[str], extra: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import torchvision.models\n\ndef build(config): ...\n")
    done = _core_only(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert f'pip install "samebits[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["own.py"]


@pytest.mark.full
def test_digits_trains_and_predicts_with_the_core_alone(tmp_path: Path, repo: Path) -> None:
    done = _core_only("train", "digits", "epochs=2", "--procs", "1", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'pip install "samebits[trackers]"' in done.stdout
    assert not (tmp_path / "run/tensorboard").exists()
    assert "could not be drawn" not in done.stdout
    done = _core_only("predict", "run", str(repo / "docs/pictures/digit.png"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "probability" in done.stdout
