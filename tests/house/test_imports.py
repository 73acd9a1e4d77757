"""Imports go down only, and modules that must load fast do not import torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "sklearn", "scipy", "tensorboard", "matplotlib")


def _modules_that_must_be_light() -> list[str]:
    paths = [
        *(ROOT / "lockstep/config").glob("[a-z]*.py"),
        *(ROOT / "lockstep/recipes").glob("*/config.py"),
        ROOT / "lockstep/recipes/catalog.py",
        ROOT / "lockstep/cluster/env.py",
        ROOT / "lockstep/cluster/signals.py",
        ROOT / "lockstep/cli/main.py",
    ]
    return ["lockstep", "lockstep.errors", *sorted(_name(path) for path in paths)]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _lint(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_logo=True, no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def small_package(tmp_path: Path) -> Path:
    """A package with every layer and the contracts of this checkout."""
    # Every package, empty, and every module that a contract names.
    inside = (ROOT / "lockstep").iterdir()
    packages = [_name(path) for path in inside if path.suffix == ".py" or (path / "__init__.py").is_file()]
    contracts = (ROOT / ".importlinter").read_text()
    named = re.findall(r"^    (lockstep\.\S+)$", contracts, re.MULTILINE)
    files: dict[str, str] = {".importlinter": contracts}
    for module in [*packages, *named]:
        path = Path(*module.split("."))
        files[f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"] = ""
    files["lockstep/__init__.py"] = ""
    files["lockstep/engine/loop.py"] = "from lockstep.data import order\n"
    files["lockstep/data/order.py"] = "from lockstep import errors\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.check
def test_imports_of_the_checkout_go_down_only(repo: Path) -> None:
    run = _lint(repo)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "text", "broken"),
    [
        ("lockstep/data/loader.py", "from lockstep.engine import loop\n", "imports go down only"),
        ("lockstep/metrics/x.py", "def f():\n    from lockstep.engine import loop\n", "imports go down only"),
        ("lockstep/config/load.py", "import torch\n", "does not import torch"),
        ("lockstep/recipes/mnist.py", "from lockstep.cluster import env\n", "a recipe does not depend on ranks"),
        ("lockstep/strategies/__init__.py", "", "not listed as layers"),
    ],
)
def test_an_import_that_goes_up_is_refused(small_package: Path, name: str, text: str, broken: str) -> None:
    (small_package / "lockstep/report/console.py").touch()
    assert _lint(small_package).returncode == 0, _lint(small_package).stdout
    (small_package / name).parent.mkdir(exist_ok=True)
    (small_package / name).write_text(text)
    run = _lint(small_package)
    assert run.returncode == 1
    assert broken in run.stdout + run.stderr


def test_modules_that_must_load_fast_are_imported_without_torch(repo: Path) -> None:
    modules = _modules_that_must_be_light()
    # In turn, so that the first module that imports one is named.
    code = f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
    code += f"    if heavy := set(sys.modules) & set({HEAVY!r}): sys.exit(f'{{name}} imports {{sorted(heavy)}}')"
    run = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
