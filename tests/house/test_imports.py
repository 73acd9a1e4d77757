"""Imports go down only, never in a circle, and modules that must load fast do not import torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import python

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "sklearn", "scipy", "tensorboard", "matplotlib")


def _modules_that_must_be_light() -> list[str]:
    paths = [
        *(ROOT / "src/samebits/config").glob("[a-z]*.py"), *(ROOT / "src/samebits/recipes").glob("*/config.py"),
        *(ROOT / f"src/samebits/{name}.py" for name in (
            "recipes/catalog", "cluster/env", "cluster/signals", "cluster/address", "cli/main", "launch/forkserver",
            "launch/failures",
        )),
    ]  # fmt: skip
    return ["samebits", "samebits.errors", *sorted(_name(path) for path in paths)]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)


def _lint(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_logo=True, no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def small_package(tmp_path: Path) -> Path:
    """A package with every layer and the contracts of this checkout."""
    # Every package, empty, and every module that a contract names.
    inside = (ROOT / "src" / "samebits").iterdir()
    packages = [_name(path) for path in inside if path.suffix == ".py" or (path / "__init__.py").is_file()]
    contracts = (ROOT / ".importlinter").read_text()
    named = re.findall(r"^    (samebits\.\S+)$", contracts, re.MULTILINE)
    files: dict[str, str] = {".importlinter": contracts}
    for module in [*packages, *named]:
        path = Path("src", *module.split("."))
        files[f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"] = ""
    for importer, imported in re.findall(r"^    (samebits\.\S+) -> (samebits\.\S+)$", contracts, re.MULTILINE):
        name = f"src/{importer.replace('.', '/')}.py"
        files[name] = files.get(name, "") + f"import {imported}\n"
        files.setdefault(f"src/{imported.replace('.', '/')}.py", "")
        files[f"src/{importer.rpartition('.')[0].replace('.', '/')}/__init__.py"] = ""
        files[f"src/{imported.rpartition('.')[0].replace('.', '/')}/__init__.py"] = ""
    files["src/samebits/__init__.py"] = ""
    files["src/samebits/engine/loop.py"] = "from samebits.data import order\n"
    files["src/samebits/data/order.py"] = "from samebits import errors\n"
    files["src/samebits/data/loader.py"] = "def f():\n    from samebits.data import order\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.check
def test_imports_of_the_checkout_follow_the_contracts(repo: Path) -> None:
    run = _lint(repo)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "text", "broken"),
    [
        ("src/samebits/data/loader.py", "from samebits.engine import loop\n", "imports go down only"),
        ("src/samebits/metrics/x.py", "def f():\n    from samebits.engine import loop\n", "imports go down only"),
        ("src/samebits/config/load.py", "import torch\n", "does not import torch"),
        ("src/samebits/recipes/mnist.py", "from samebits.cluster import env\n", "a recipe does not depend on ranks"),
        ("src/samebits/errors.py", "def f():\n    import torch\n", "the order of samples is computed without torch"),
        (
            "src/samebits/data/order.py",
            "if TYPE_CHECKING:\n    from samebits.data import loader\n",
            "modules and folders import each other in one direction",
        ),
        ("src/samebits/strategies/__init__.py", "", "not listed as layers"),
        (
            "src/samebits/own_loop/x.py",
            "from samebits.config import load\n",
            "what samebits.exact needs imports no settings",
        ),
    ],
)
def test_an_import_that_breaks_a_contract_is_refused(small_package: Path, name: str, text: str, broken: str) -> None:
    (small_package / "src/samebits/report/console.py").touch()
    assert _lint(small_package).returncode == 0, _lint(small_package).stdout
    (small_package / name).parent.mkdir(exist_ok=True)
    (small_package / name).write_text(text)
    run = _lint(small_package)
    assert run.returncode == 1
    assert re.search(rf"{broken}(?! KEPT)", run.stdout + run.stderr)


def test_modules_that_must_load_fast_are_imported_without_torch(repo: Path) -> None:
    modules = _modules_that_must_be_light()
    # In turn, so that the first module that imports one is named.
    code = f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
    code += f"    if heavy := set(sys.modules) & set({HEAVY!r}): sys.exit(f'{{name}} imports {{sorted(heavy)}}')"
    python("-c", code, cwd=repo)


def test_exact_loads_no_package_for_settings_and_commands(repo: Path) -> None:
    code = """
import sys
from samebits import exact, EvalLoader
loaded = {'pydantic', 'typer', 'rich', 'yaml'} & set(sys.modules)
sys.exit(f'samebits.exact loads {sorted(loaded)}' if loaded else 0)
"""
    python("-c", code, cwd=repo)
