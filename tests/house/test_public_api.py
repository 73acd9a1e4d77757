"""Examples and documentation use only public names of Samebits: those in `samebits.__all__`."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import samebits

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(?:%%.*\n)?(.*?)^```", re.MULTILINE | re.DOTALL)  # without a notebook's magic
INNER = re.compile(r"`samebits\.[a-z_]+\.[a-z_.]+\b")
# These describe the code itself, not its use.
FOR_DEVELOPERS = {"tour.md", "developers.md", "results.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def pages() -> list[Path]:
    found = [
        *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/zh-CN/*.md"), *ROOT.glob("src/samebits/**/*.md"),
    ]  # fmt: skip
    return sorted(path for path in found if path.name not in FOR_DEVELOPERS)


def programs() -> Iterator[tuple[str, str]]:
    """Return the name and text of every example, recipe of a benchmark, and Python block of a page."""
    for path in [*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/**/*_recipe.py")]:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in pages():
        for number, match in enumerate(BLOCK.finditer(path.read_text(encoding="utf-8")), start=1):
            yield f"{path.relative_to(ROOT).as_posix()}, block {number}", match[1]


def private_names(text: str) -> list[str]:
    """Return what a program uses of Samebits that is not public."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("samebits.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "samebits":
            names = [alias.name for alias in node.names]
            is_public = node.module == "samebits" and set(names) <= set(samebits.__all__)
            found += [] if is_public else [f"{node.module}: {', '.join(names)}"]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "samebits":
            found += [] if node.attr in samebits.__all__ else [f"samebits.{node.attr}"]
    return found


PROGRAMS = dict(programs())


def test_there_are_programs_to_look_at() -> None:
    assert {"examples/own_loop.py", "examples/own_recipe.py", "examples/spawn.py"} <= PROGRAMS.keys()
    assert any(name.startswith("README.md") for name in PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_examples_and_documents_uses_public_names_only(name: str) -> None:
    assert private_names(PROGRAMS[name]) == []


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_for_users_names_no_inner_module(path: Path) -> None:
    assert INNER.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "program",
    [
        "import samebits.engine.loop",
        "from samebits.errors import SamebitsError",
        "from samebits import Parts, nothing",
        "import samebits\nsamebits.nothing()",
    ],
)
def test_an_inner_name_is_noticed(program: str) -> None:
    assert private_names(program)


def test_every_public_name_can_be_imported_and_documents_itself() -> None:
    for name in samebits.__all__:
        assert getattr(samebits, name) is not None
        if name != "__version__":
            assert getattr(samebits, name).__doc__, name
    assert set(samebits.__all__) <= set(dir(samebits))
    with pytest.raises(AttributeError, match="nothing"):
        samebits.nothing  # noqa: B018 - the access is what is tested


def test_samebits_and_its_settings_and_errors_are_imported_without_torch() -> None:
    program = "import sys, samebits; samebits.RunConfig, samebits.Settings, samebits.SamebitsError, samebits.Stopped\n"
    program += "samebits.train, samebits.world, samebits.run_command\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"
