"""Tools enter what runs a training only through `bench`, and by the doors that are listed here, each with its reason.

The list may shrink, and not grow: a tool that needs more of a run asks `bench` for it, so that a change of the engine
has few callers.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNEL = ("cluster", "engine", "launch", "metrics", "module", "optim", "own_loop", "parallel", "watchdog")
TYPES = ("cluster.env", "cluster.world", "engine.job", "engine.parts", "engine.progress")  # of what bench gives
# Each tool's doors: modules of the kernel, and why bench does not stand before them.
DOORS: dict[str, dict[str, str]] = {
    "doctor": {
        "cluster.address cluster.collectives cluster.rendezvous": "the network itself is tried",
        "engine.build": "only data is opened, no job",
    },
    "inference": {
        "engine.build module.determinism": "a trained model has weights and no job",
        "engine.evaluate metrics.eval_sets watchdog.detector": "it is evaluated",
        "launch.start": "a user's program may be one rank of a world",
    },
    "replay": {
        "cluster.collectives": "answers of a trial are encoded; only rank 0 compares with a record",
        "cluster.signals": "an interpreter of its own ends with its parent",
        "engine.build module.check_model": "each part of a recipe is built under a tracer, and two runs in one process",
        "engine.checkpoints optim.build": "a trial stops, saves and resumes; states are restored and copied",
        "engine.evaluate engine.output.recorder": "steps and evaluations are compared with the run's",
        "module.determinism": "torch's switches change with the run that is replayed, and a probe has no job",
        "own_loop.session": "a loop of a script is observed by its one hook",
        "parallel.checksum": "digests on a GPU",
        "watchdog.detector": "a trial may hang",
    },
    "run_views": {},
}
NUM_DOORS = sum(len(names.split()) for doors in DOORS.values() for names in doors)


def used(root: Path, tool: str) -> set[str]:
    """Return the modules of the kernel that a tool imports, without `samebits.`."""
    source = root / "src/samebits"
    names = (name for path in (source / tool).rglob("*.py") for name in _imported(ast.parse(path.read_text()), source))
    return {name for name in names if name.partition(".")[0] in KERNEL}


def _imported(tree: ast.AST, source: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.removeprefix("samebits.") for each in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samebits."):
            name = str(node.module).removeprefix("samebits.")
            is_folder = (source / name.replace(".", "/")).is_dir()
            yield from (f"{name}.{each.name}" for each in node.names) if is_folder else [name]


def problems(root: Path) -> list[str]:
    """Return what is imported and not listed, and what is listed and not imported."""
    found = []
    for tool, doors in DOORS.items():
        listed, there = {name for names in doors for name in names.split()}, used(root, tool) - {*TYPES}
        found += [f"{tool} imports {name}: ask bench for it" for name in sorted(there - listed)]
        found += [f"{tool} does not import {name}: remove it here" for name in sorted(listed - there)]
    return found


@pytest.mark.check
def test_tools_enter_the_kernel_by_bench_and_the_listed_doors(repo: Path) -> None:
    assert problems(repo) == []
    assert NUM_DOORS <= 24, "the list may not grow"


@pytest.mark.check
@pytest.mark.parametrize(
    "line",
    ["from samebits.engine.step import run_step", "import samebits.launch.launch", "from samebits.engine import run"],
)
def test_another_door_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "src/samebits/engine").mkdir(parents=True)
    (tmp_path / "src/samebits/doctor").mkdir()
    (tmp_path / "src/samebits/doctor/find.py").write_text(f"def f():\n    {line}\n")
    assert [text for text in problems(tmp_path) if text.startswith("doctor imports ")]
