"""The checkout follows the house rules, and every rule detects when it is broken."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import code_rules, docstring_rules, file_rules, safety_rules

# Each takes the root of a checkout and returns the violations.
Rule = Callable[[Path], list[str]]
Files = str | dict[str, str]  # the text of one file, or of several
RULES: tuple[Rule, ...] = (*file_rules.ALL, *code_rules.ALL, *docstring_rules.ALL, *safety_rules.ALL)

# rule -> (file or a name, text that breaks it, text of the report)
BROKEN: dict[Rule, list[tuple[str, Files, str]]] = {
    file_rules.long_files: [("lockstep/data/x.py", "x = 1\n" * 401, "x.py: 401 lines")],
    file_rules.long_functions: [
        ("tests/test_x.py", "def test_x():\n" + "    x = 1\n" * 60, "test_x has 61 lines"),
        ("lockstep/x.py", "class A:\n    async def go(self):\n" + "        x = 1\n" * 70, "go has 71 lines"),
    ],
    file_rules.long_pages: [
        ("lockstep/engine/loop.py", "x = 1\n" * 81, "loop.py: 81 lines of code"),
        ("lockstep/other.py", "", "step.py: not there"),
    ],
    file_rules.wide_folders: [
        ("21 files", {f"lockstep/data/m{number}.py": "" for number in range(21)}, "lockstep/data: 21 files, 20 at most")
    ],
    file_rules.busy_modules: [
        (
            "21 imports",
            {
                "lockstep/x.py": "".join(f"from lockstep.data.m{number} import f\n" for number in range(20))
                + "from lockstep.data import m20\n",
                **{f"lockstep/data/m{number}.py": "f = 1\n" for number in range(20)},
                "lockstep/data/m20.py": "",
            },
            "lockstep/x.py: imports 21 modules of the package",
        )
    ],
    file_rules.full_inits: [("lockstep/data/__init__.py", "from lockstep.data.order import Order\n", "not empty")],
    file_rules.nameless_places: [
        ("lockstep/utils/x.py", "", "utils says nothing"),
        ("lockstep/data/helpers.py", "", "helpers says nothing"),
    ],
    code_rules.errors_without_a_fix: [
        ("lockstep/data/x.py", "raise LockstepError('no', given=1)\n", "x.py:1: an error without a fix"),
        ("lockstep/data/x.py", "raise LockstepError('no', fix='')\n", "x.py:1: an error without a fix"),
        ("lockstep/data/x.py", "raise errors.LockstepError('no', **more)\n", "x.py:1: an error without a fix"),
        ("lockstep/data/x.py", "class A(LockstepError): ...\nclass B(A): ...\nB('no')\n", "x.py:3: an error without"),
    ],
    code_rules.ranks_asked_for: [
        ("lockstep/engine/x.py", "import torch.distributed as dist\nr = dist.get_rank()\n", "x.py:2: asks"),
        ("lockstep/data/x.py", "from torch.distributed import get_world_size\n", "x.py:1: asks"),
    ],
    code_rules.ranks_read_from_environment: [
        ("lockstep/engine/x.py", "import os\nr = os.environ['RANK']\n", "reads RANK"),
        ("lockstep/engine/x.py", "import os\nr = os.environ.get('LOCAL_RANK', 0)\n", "reads LOCAL_RANK"),
        ("lockstep/cluster/world.py", "import os\nr = os.getenv('SLURM_PROCID')\n", "reads SLURM_PROCID"),
        ("lockstep/cli/x.py", "import os\nr = 'WORLD_SIZE' in os.environ\n", "reads WORLD_SIZE"),
    ],
    code_rules.stray_speech: [
        ("lockstep/engine/x.py", "print('hello')\n", "x.py:1: speaks"),
        ("lockstep/data/x.py", "import sys\nsys.stderr.write('hello')\n", "x.py:2: speaks"),
    ],
    code_rules.borrowed_names: [
        ("lockstep/engine/x.py", "from lockstep.errors import ClassVar\n", "does not define ClassVar"),
        ("tests/test_x.py", "from lockstep.gone import Thing\n", "does not define Thing"),
    ],
    code_rules.missing_docstrings: [
        ("lockstep/x.py", "x = 1\n", "the module has no docstring"),
        ("lockstep/x.py", '"""X."""\ndef f(): ...\n', "x.py:2: f has no docstring"),
        ("lockstep/x.py", '"""X."""\nclass A:\n    """A."""\n    def f(self): ...\n', "x.py:4: f has no docstring"),
    ],
    code_rules.twin_classes: [
        (
            "two classes",
            {"lockstep/x.py": "class Job: ...\n", "lockstep/data/y.py": "x = 1\nclass Job: ...\n"},
            "two classes Job: lockstep/data/y.py:2 lockstep/x.py:1",
        ),
        (
            "a class named as a recipe's settings",
            {"lockstep/x.py": "class DataConfig: ...\n", "lockstep/y.py": "class DataConfig: ...\n"},
            "two classes DataConfig",
        ),
    ],
    code_rules.old_words: [
        ("lockstep/x.py", "max_iter = 1\n", "max_iter; say step"),
        ("lockstep/x.py", "def train(num_iterations): ...\n", "num_iterations; say step"),
    ],
    file_rules.machine_paths: [
        ("lockstep/x.py", f"x = '/{'home'}/anna/data'\n", f"/{'home'}/anna/data is a path"),
        ("docs/x.md", f"see /{'tmp'}/x\n", "docs/x.md:1"),
        ("notes.txt", f"/{'root'}/x\n", "notes.txt:1"),
    ],
    safety_rules.recursive_deletes: [
        ("lockstep/cli/x.py", "import shutil\nshutil.rmtree(out)\n", "x.py:2: shutil.rmtree deletes"),
        ("lockstep/cli/x.py", "from shutil import rmtree\nrmtree(out)\n", "x.py:2: rmtree deletes"),
    ],
    safety_rules.sudden_ends: [
        ("lockstep/cli/x.py", "import os\nos._exit(0)\n", "x.py:2: os._exit may hide"),
        ("lockstep/engine/x.py", "import atexit\natexit.register(f)\n", "x.py:2: atexit.register may hide"),
    ],
    safety_rules.unsafe_starts: [
        ("lockstep/cli/x.py", "import sys\nwords = [sys.executable, '-m', 'lockstep']\n", "x.py:2: starts Python"),
    ],
    safety_rules.unnamed_encodings: [
        ("lockstep/x.py", "text = path.read_text()\n", "x.py:1: path.read_text without"),
        ("lockstep/x.py", "file = path.open('a')\n", "x.py:1: path.open without"),
        ("lockstep/x.py", "file = open(path)\n", "x.py:1: open without"),
        ("lockstep/x.py", "subprocess.run(words, text=True)\n", "x.py:1: subprocess.run without"),
    ],
    file_rules.twin_tests: [("tests/e2e/test_x.py", "", "tests/e2e/test_x.py tests/unit/test_x.py")],
    safety_rules.pickles: [
        ("lockstep/x.py", "import pickle\nx = pickle.loads(b'')\n", "x.py:2: pickle.loads pickles"),
        ("lockstep/x.py", "from pickle import loads\n", "x.py:1: imports from pickle"),
        ("lockstep/x.py", "dist.all_gather_object([], 1)\n", "dist.all_gather_object pickles"),
        ("lockstep/x.py", "import torch\ntorch.load('x')\n", "torch.load pickles"),
        ("lockstep/x.py", "import torch\ntorch.load('x', weights_only=False)\n", "torch.load pickles"),
        ("lockstep/x.py", "import numpy\nnumpy.load('x', allow_pickle=True)\n", "numpy.load pickles"),
    ],
}

# Docstrings of functions, as they are and as they should be.
NO_ARGS = '"""X."""\ndef f(a, *, b=1, **c):\n    """F.\n\n    Args:\n        a: One.\n    """\n'
NO_METHOD_ARGS = '"""X."""\nclass A:\n    """A."""\n    def f(self, a, b, c):\n        """F."""\n'
STALE_CLASS = '"""X."""\nclass A:\n    """A.\n\n    Args:\n        b: One.\n    """\n    def __init__(self, a): ...\n'
NO_SHAPE = '"""X."""\ndef f(a: Sequence[Tensor] | None):\n    """F."""\n'
NO_SHAPE_RETURNED = '"""X."""\ndef f() -> np.ndarray:\n    """F of (seed, epoch, step)."""\n'
ALIASED = {
    "lockstep/x.py": '"""X."""\nFloats = npt.NDArray[np.float64]\n',
    "lockstep/y.py": '"""Y."""\nfrom lockstep.x import Floats\ndef f(a: Floats):\n    """F."""\n',
}
BROKEN |= {
    docstring_rules.missing_args: [
        ("lockstep/x.py", NO_ARGS, "x.py:2: Args of f leave out b, c"),
        ("lockstep/x.py", NO_METHOD_ARGS, "x.py:4: Args of f leave out a, b, c"),
        (
            "lockstep/x.py",
            NO_METHOD_ARGS.replace('"""F."""', '"""See `B.f`."""'),
            "x.py:4: Args of f leave out a, b, c",
        ),
        ("lockstep/x.py", NO_METHOD_ARGS.replace("def f", "def __init__"), "x.py:4: Args of A leave out a, b, c"),
        ("lockstep/x.py", NO_METHOD_ARGS.replace("A:", "A(nn.Module):"), "x.py:4: Args of f leave out a, b, c"),
    ],
    docstring_rules.stale_args: [
        ("lockstep/x.py", NO_ARGS.replace("a:", "aa:"), "x.py:2: f has no aa"),
        ("lockstep/x.py", STALE_CLASS, "x.py:8: A has no b"),
    ],
    docstring_rules.third_person: [
        ("lockstep/x.py", '"""Reads x."""\n', "x.py:1: the docstring starts with Reads"),
        ("lockstep/x.py", '"""X."""\ndef _f():\n    """Returns x."""\n', "x.py:2: the docstring starts with Returns"),
    ],
    docstring_rules.missing_shapes: [
        ("lockstep/x.py", NO_SHAPE, "x.py:2: f names no shape"),
        ("lockstep/x.py", NO_SHAPE_RETURNED, "x.py:2: f names no shape"),
        ("an alias", ALIASED, "y.py:3: f names no shape"),
    ],
}

# Text that looks like a violation and is allowed.
ALLOWED: dict[Rule, list[tuple[str, str]]] = {
    code_rules.errors_without_a_fix: [
        ("lockstep/data/x.py", '"""X."""\nraise LockstepError("no", fix="Wait.")\nraise error.with_slots(where=1)\n'),
        ("lockstep/data/x.py", '"""X."""\nraise ValueError("no")\n'),
    ],
    safety_rules.recursive_deletes: [("lockstep/scratch.py", '"""S."""\nimport shutil\nshutil.rmtree(folder)\n')],
    safety_rules.sudden_ends: [("lockstep/launch/worker.py", '"""W."""\nimport os\nos._exit(0)\n')],
    safety_rules.unsafe_starts: [("lockstep/x.py", "import sys\nwords = (sys.executable, '-P', '-m', 'lockstep')\n")],
    safety_rules.unnamed_encodings: [
        ("lockstep/x.py", "text = path.read_text(encoding='utf-8')\nfile = path.open('rb')\n"),
        ("lockstep/x.py", "handle = os.open(path, os.O_RDONLY)\nfolder.open()\n"),
    ],
    file_rules.long_functions: [("lockstep/x.py", 'def f():\n    """Why.\n' + "    more\n" * 80 + '    """\n')],
    file_rules.full_inits: [("lockstep/__init__.py", "x = 1\n")],
    code_rules.ranks_asked_for: [
        ("lockstep/cluster/world.py", "import torch.distributed as dist\nr = dist.get_rank()\n")
    ],
    code_rules.ranks_read_from_environment: [
        ("lockstep/cluster/env.py", "import os\nr = os.environ['RANK']\n"),
        ("lockstep/launch/launch.py", "import os\nos.environ['RANK'] = '1'\n"),
        ("lockstep/cli/x.py", "import os\nr = os.environ.get('LOCKSTEP_DEBUG')\n"),
    ],
    code_rules.stray_speech: [("lockstep/report/x.py", "print('hello')\n"), ("tests/test_x.py", "print('hello')\n")],
    code_rules.borrowed_names: [
        ("lockstep/x.py", "from lockstep.errors import LockstepError\nfrom lockstep import errors\n")
    ],
    code_rules.missing_docstrings: [
        ("lockstep/x.py", '"""X."""\ndef _f(): ...\n'),
        ("tests/test_x.py", "def f(): ...\n"),
    ],
    code_rules.twin_classes: [
        ("lockstep/x.py", '"""X."""\nclass _A: ...\nclass _A: ...\n'),
        (
            "lockstep/recipes/a/config.py",
            '"""X."""\nclass DataConfig:\n    """D."""\n\nclass DataConfig:\n    """D."""\n',
        ),
    ],
    code_rules.old_words: [("lockstep/x.py", "class A:\n    def __iter__(self): return iter([])\n")],
    safety_rules.pickles: [
        ("lockstep/x.py", "import torch\nimport pickle\ntorch.load('x', weights_only=True)\n"),
        ("lockstep/x.py", "import pickle\nraise pickle.UnpicklingError('x')\n"),
        ("tests/test_x.py", "import pickle\nx = pickle.loads(b'')\n"),
    ],
    docstring_rules.missing_args: [
        ("lockstep/x.py", NO_ARGS.replace("a: One.", "a, b: Two.\n        **c: More.")),
        ("lockstep/x.py", '"""X."""\nclass A:\n    """A."""\n    def f(self, a, b):\n        """F."""\n'),
        ("lockstep/x.py", NO_METHOD_ARGS.replace("def f", "def _f").replace("class A", "class B(A)")),
        ("lockstep/cli/x.py", '"""X."""\n@app.command("f")\ndef f(a, b, c):\n    """F."""\n'),
    ],
    docstring_rules.missing_shapes: [
        ("lockstep/x.py", NO_SHAPE.replace("F.", f"F: {shape}."))
        for shape in ("(N, C, H, W)", "(n,)", "(..., 2)", "(N, K + T, H / 4)", "a scalar", "any shape")
    ],
    file_rules.machine_paths: [("docs/x.md", f"https://x.org/{'home'}/a and file:///{'tmp'}/store and ~/{'work'}/a\n")],
}


@pytest.mark.check
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_checkout_follows_the_rule(repo: Path, rule: Rule) -> None:
    assert rule(repo) == []


@pytest.mark.check
def test_files_are_short_enough_to_read(repo: Path) -> None:
    for problem in file_rules.long_files(repo, limit=file_rules.SOFT_LIMIT_LINES):
        warnings.warn(f"{problem} (hard limit {file_rules.HARD_LIMIT_LINES})", stacklevel=1)
    over = len(file_rules.long_files(repo, limit=file_rules.SOFT_LIMIT_LINES))
    assert over <= 3, "files over 300 lines are the exception: split some"


def _cases(table: dict[Rule, list]) -> list:
    return [
        pytest.param(rule, *case, id=f"{rule.__name__}-{case[0]}") for rule, cases in table.items() for case in cases
    ]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small checkout that follows every rule."""
    for name, text in {
        "lockstep/__init__.py": "",
        "lockstep/errors.py": '"""E."""\nfrom typing import ClassVar\nclass LockstepError(Exception):\n    """E."""\n',
        "lockstep/engine/loop.py": '"""L."""\n',
        "lockstep/engine/step.py": '"""S."""\n',
        "tests/unit/test_x.py": "",
    }.items():
        _write(tmp_path / name, text)
    for rule in RULES:
        assert rule(tmp_path) == [], rule.__name__
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.check
@pytest.mark.parametrize(("rule", "name", "text", "says"), _cases(BROKEN))
def test_a_broken_rule_is_reported(house: Path, rule: Rule, name: str, text: Files, says: str) -> None:
    for file, content in text.items() if isinstance(text, dict) else [(name, text)]:
        _write(house / file, content)
    if says.endswith("not there"):
        (house / "lockstep/engine/step.py").unlink()
    problems = rule(house)
    assert any(says in problem for problem in problems), problems


@pytest.mark.check
@pytest.mark.parametrize(("rule", "name", "text"), _cases(ALLOWED))
def test_what_only_looks_like_a_violation_is_allowed(house: Path, rule: Rule, name: str, text: str) -> None:
    _write(house / name, text)
    assert rule(house) == []


@pytest.mark.check
def test_every_rule_is_broken_on_purpose() -> None:
    assert set(BROKEN) == set(RULES)
